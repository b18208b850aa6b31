"""What the sensors share: they look in a worker, or in a triggerer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import msgspec
from airflow.sdk import BaseSensorOperator, PokeReturnValue
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout, AirflowSkipException

from edl_airflow.client import open_client
from edl_airflow.connection import EdlConnection
from edl_airflow.failures import WaitTimeoutError, error_for, failing_without_retry
from edl_airflow.hooks.edl import EdlHook
from edl_airflow.operators.templates import TemplatedOperator, run_start
from edl_airflow.runtime.spec import TaskOutcome
from edl_airflow.waits.conditions import Condition, Observation, evaluate
from edl_runtime.distill.errors import NoTeacherError

if TYPE_CHECKING:
    from airflow.sdk import Context

    from edl_airflow.triggers.base import EdlTrigger

AnyCondition = TypeVar("AnyCondition", bound=Condition[Any])

POKE_EVERY_S = 5


class EdlSensor(TemplatedOperator, BaseSensorOperator, Generic[AnyCondition]):
    """Looks until a wait has ended. Deferrable, it needs a worker only to look once and to finish.

    Fails at once when what is waited for can't come any more; with `soft_fail` or `never_fail` it is skipped then.
    `timeout` (seconds) limits the wait, `poke_interval` is 5 s unless given. A Redis that is away is waited for.
    In mode `reschedule` each look is a first one, so what has ended and left no word is waited for like what has yet to
    come.

    Subclasses say what is waited for (`new_wait`) and what to return when it is there (`result`).
    """

    edl_conn_id: str
    deferrable: bool
    _condition: AnyCondition | None = None
    _said: str = ""

    def __init__(self, *, poke_interval: float = POKE_EVERY_S, **kwargs: Any) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)

    def new_condition(self, until: float) -> AnyCondition:
        """Say what to wait for, from the rendered fields. Raises SpecError."""
        raise NotImplementedError

    def result(self, outcome: TaskOutcome) -> Any:
        """Return the XCom of a wait that has ended well."""
        raise NotImplementedError

    def observe(self, condition: AnyCondition) -> Observation:
        """Look once."""
        return asyncio.run(_observe(condition, EdlHook(self.edl_conn_id).edl_connection()))

    def trigger(self, condition: AnyCondition) -> EdlTrigger:
        """Return what goes on with the wait in the triggerer."""
        from edl_airflow.triggers.conditions import EdlConditionTrigger

        return EdlConditionTrigger(condition=msgspec.to_builtins(condition))

    def execute(self, context: Context) -> Any:
        """Wait in this process, or look once and defer."""
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
        """Look once."""
        with failing_without_retry():
            self._condition = self._condition or msgspec.structs.replace(
                self.new_condition(time.time() + self.timeout), began_at=run_start(context).timestamp()
            )
            view = self.observe(self._condition)
        if view.trouble:
            self.log.warning("%s. Waiting for it", view.trouble)
        outcome = evaluate(self._condition, view, time.time())
        self._condition = self._condition.after(view)
        if outcome is None or outcome.ended in {"no_teacher", "not_yet", "timed_out"}:  # that is Airflow's to say
            self._tell(self._condition, view)
            return PokeReturnValue(is_done=False)
        return PokeReturnValue(is_done=True, xcom_value=self._finish(outcome))

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:  # noqa: ARG002
        """Finish what the triggerer waited for, on a sensor that has never executed."""
        return self._finish(msgspec.convert(event, TaskOutcome))

    @property
    def _is_lenient(self) -> bool:
        return self.soft_fail or self.never_fail

    def _tell(self, condition: AnyCondition, view: Observation) -> None:
        """Log what is waited for, and what lacks; once, and again when that changes."""
        lacks = f"Waiting for {condition.about!r}: {condition.on_timeout(view).reason}"
        if lacks != self._said and not view.trouble:
            self.log.info("%s", lacks)
        self._said = lacks

    def _defer(self) -> NoReturn:
        assert self._condition is not None  # noqa: S101 (`poke` has made it)
        self.defer(trigger=self.trigger(self._condition), method_name="execute_complete")

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
