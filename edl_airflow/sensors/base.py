"""Base of the sensors: they check a condition in a worker or in a triggerer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import msgspec
from airflow.sdk import BaseSensorOperator, PokeReturnValue
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout, AirflowSkipException

from edl_airflow.client import open_client
from edl_airflow.failures import WaitTimeoutError, error_for, failing_without_retry
from edl_airflow.hooks.edl import EdlConnection, EdlHook
from edl_airflow.operators.templates import TemplatedOperator, run_start
from edl_airflow.runtime.spec import TaskOutcome
from edl_airflow.waits.conditions import Condition, Observation, evaluate
from edl_runtime.distill.errors import NoTeacherError

if TYPE_CHECKING:
    from airflow.sdk import Context

AnyCondition = TypeVar("AnyCondition", bound=Condition[Any])

POKE_EVERY_S = 5


class EdlSensor(TemplatedOperator, BaseSensorOperator, Generic[AnyCondition]):
    """Waits for a condition. Deferrable, it needs a worker only for the first check and to finish.

    Fails at once when the condition can't become true any more; with `soft_fail` or `never_fail` it is skipped then.
    `timeout` (seconds) limits the wait, the default `poke_interval` is 5 s. It waits for a Redis that is away. In mode
    `reschedule` each check starts afresh, so a job that has ended without a trace looks like one that has yet to start.

    Subclasses define the condition (`new_condition`) and the task's `result`.
    """

    edl_conn_id: str
    deferrable: bool
    _condition: AnyCondition | None = None
    _logged: str = ""

    def __init__(self, *, poke_interval: float = POKE_EVERY_S, **kwargs: Any) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)

    def new_condition(self, until: float) -> AnyCondition:
        """Return the condition, by the rendered fields. Raises SpecError."""
        raise NotImplementedError

    def result(self, outcome: TaskOutcome) -> Any:
        """Return the XCom of a wait that has succeeded."""
        raise NotImplementedError

    def observe(self, condition: AnyCondition) -> Observation:
        """Observe once."""
        return asyncio.run(_observe(condition, EdlHook(self.edl_conn_id).edl_connection()))

    def execute(self, context: Context) -> Any:
        """Wait in this process, or check once and defer."""
        self._condition = None
        if not self.deferrable:
            return super().execute(context)
        try:
            done = self.poke(context)
        except AirflowFailException as error:
            if self._is_lenient:
                raise AirflowSkipException(str(error)) from error
            raise
        return done.xcom_value if done else self._defer()

    def poke(self, context: Context) -> PokeReturnValue:
        """Check once."""
        with failing_without_retry():
            self._condition = self._condition or msgspec.structs.replace(
                self.new_condition(time.time() + self.timeout), began_at=run_start(context).timestamp()
            )
            view = self.observe(self._condition)
        if view.trouble:
            self.log.warning("%s. Waiting for it", view.trouble)
        outcome = evaluate(self._condition, view, time.time())
        self._condition = self._condition.after(view)
        if outcome is None or outcome.ended in {"no_teacher", "not_yet", "timed_out"}:  # Airflow applies the timeout
            self._log_missing(self._condition, view)
            return PokeReturnValue(is_done=False)
        return PokeReturnValue(is_done=True, xcom_value=self._finish(outcome))

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:  # noqa: ARG002
        """Finish after the triggerer; this is a new instance, on which `execute` has not run."""
        return self._finish(msgspec.convert(event, TaskOutcome))

    @property
    def _is_lenient(self) -> bool:
        return self.soft_fail or self.never_fail

    def _log_missing(self, condition: AnyCondition, view: Observation) -> None:
        """Log what is missing, once, and again when that changes."""
        missing = f"Waiting for {condition.about!r}: {condition.on_timeout(view).reason}"
        if missing != self._logged and not view.trouble:
            self.log.info("%s", missing)
        self._logged = missing

    def _defer(self) -> NoReturn:
        from edl_airflow.triggers.conditions import EdlConditionTrigger

        assert self._condition is not None  # noqa: S101 (`poke` has made it)
        trigger = EdlConditionTrigger(condition=msgspec.to_builtins(self._condition))
        self.defer(trigger=trigger, method_name="execute_complete")

    def _finish(self, outcome: TaskOutcome) -> Any:
        failure = error_for(outcome, self.timeout)
        if isinstance(failure, NoTeacherError | WaitTimeoutError):
            failure = AirflowSensorTimeout(str(failure))
        if failure and self._is_lenient:
            raise AirflowSkipException(str(failure)) from failure
        if failure:
            raise failure
        return self.result(outcome)


async def _observe(condition: Condition[Any], edl_connection: EdlConnection) -> Observation:
    async with open_client(edl_connection) as client:
        seen: Observation = await condition.observe(client)
    return seen
