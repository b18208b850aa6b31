"""The base of sensors, which wait for a condition in a worker or in a triggerer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import msgspec
from airflow.sdk import BaseSensorOperator, PokeReturnValue
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout, AirflowSkipException

from edl_airflow import waits
from edl_airflow.client import open_client
from edl_airflow.failures import WaitTimeoutError, error_for, failing_without_retry
from edl_airflow.hooks.edl import EdlConnection, EdlHook
from edl_airflow.operators.templates import TemplatedOperator, run_start, task_deadline
from edl_airflow.runtime.spec import TaskOutcome
from edl_airflow.waits import Condition, Observation, evaluate
from edl_runtime.distill.errors import NoTeacherError

if TYPE_CHECKING:
    from airflow.sdk import Context

POKE_EVERY_S = 5

_TIMEOUTS = frozenset({"no_teacher", "no_pool", "not_yet", "timed_out"})
"""Outcomes of a wait that is over: where a sensor pokes, Airflow applies the timeout."""


class EdlSensor(TemplatedOperator, BaseSensorOperator):
    """Waits for a condition. Deferrable, it needs a worker only for the first check and to finish.

    Fails at once when the condition can't become true any more; with `soft_fail` or `never_fail` it is skipped then.
    `timeout` (seconds) limits the wait, the default `poke_interval` is 5 s. It waits for a Redis that is away. In mode
    `reschedule` each check starts afresh, so a job that has ended without a trace looks like one that has yet to start.

    Subclasses define the kind of `condition`, whose fields have the names of the arguments, and the task's `result`.
    """

    condition: ClassVar[type[Condition[Any]]]

    edl_conn_id: str
    deferrable: bool
    _condition: Condition[Any] | None = None
    _logged: str = ""

    def __init__(self, *, poke_interval: float = POKE_EVERY_S, **kwargs: Any) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)

    def result(self, outcome: TaskOutcome) -> Any:
        """Return the XCom of a wait that has succeeded."""
        raise NotImplementedError

    def condition_fields(self) -> dict[str, Any]:
        """Return what the rendered arguments mean, None for those that are not given. Raises SpecError."""
        return {field: self.argument(field) for field in self.arguments}

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
            condition = self._condition or self._new_condition(context)
            view = self._observe(condition)
        if view.trouble:
            self.log.warning("%s. Waiting for it", view.trouble)
        outcome = evaluate(condition, view, waits.clock())
        self._condition = condition.after(view)
        if outcome is None or outcome.ended in _TIMEOUTS:
            self._log_missing(condition, view)
            return PokeReturnValue(is_done=False)
        return PokeReturnValue(is_done=True, xcom_value=self._finish(outcome))

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:  # noqa: ARG002
        """Finish after the triggerer; this is a new instance, on which `execute` has not run."""
        return self._finish(msgspec.convert(event, TaskOutcome))

    @property
    def _is_lenient(self) -> bool:
        return self.soft_fail or self.never_fail

    def _new_condition(self, context: Context) -> Condition[Any]:
        return self.condition(
            conn_id=self.edl_conn_id,
            wait_timeout_s=self.timeout,
            until=time.time() + self.timeout,
            deadline=task_deadline(self),
            began_at=run_start(context).timestamp(),
            **{field: value for field, value in self.condition_fields().items() if value is not None},
        )

    def _observe(self, condition: Condition[Any]) -> Observation:
        async def observe(edl_connection: EdlConnection) -> Any:
            async with open_client(edl_connection) as client:
                return await condition.observe(client, waits.clock())

        if condition.needs_client:
            seen: Observation = asyncio.run(observe(EdlHook(self.edl_conn_id).edl_connection()))
        else:
            client: Any = None
            seen = asyncio.run(condition.observe(client, waits.clock()))
        return seen

    def _log_missing(self, condition: Condition[Any], view: Observation) -> None:
        """Log what is missing, once, and again when that changes."""
        missing = f"Waiting for {condition.about!r}: {condition.on_timeout(view).reason}"
        if missing != self._logged and not view.trouble:
            self.log.info("%s", missing)
        self._logged = missing

    def _defer(self) -> NoReturn:
        if self._condition is None:
            raise RuntimeError("nothing has been checked")
        from edl_airflow.triggers.task import EdlConditionTrigger

        self.defer(trigger=EdlConditionTrigger.of(self._condition), method_name="execute_complete")

    def _finish(self, outcome: TaskOutcome) -> Any:
        failure = error_for(outcome, self.timeout)
        if isinstance(failure, NoTeacherError | WaitTimeoutError):
            failure = AirflowSensorTimeout(str(failure))
        if failure and self._is_lenient:
            raise AirflowSkipException(str(failure)) from failure
        if failure:
            raise failure
        return self.result(outcome)
