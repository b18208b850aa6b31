"""Conditions, and the base of the sensors that wait for them, in a worker or in a triggerer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Self, TypeVar

import msgspec
from airflow.sdk import BaseSensorOperator, PokeReturnValue
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout, AirflowSkipException

from edl_airflow.client import EdlClient, open_client
from edl_airflow.failures import WaitTimeoutError, error_for, failing_without_retry
from edl_airflow.hooks.edl import EdlConnection, EdlHook
from edl_airflow.operators.templates import TemplatedOperator, run_start, task_deadline
from edl_airflow.runtime.log import LogFunction
from edl_airflow.runtime.runner import POLL_INTERVAL_S
from edl_airflow.runtime.spec import TaskOutcome
from edl_runtime.backends.interface import JobStatus
from edl_runtime.distill.errors import NoTeacherError

if TYPE_CHECKING:
    from airflow.sdk import Context

POKE_EVERY_S = 5

clock = time.time
"""Unix seconds, by this machine's clock, which may be set at any time."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What there is now. `job`: the job or pool, None while the backend has none. `trouble`: why Redis is away."""

    job: JobStatus | None = None
    trouble: str = ""


AnyObservation = TypeVar("AnyObservation", bound=Observation)


class Condition(msgspec.Struct, Generic[AnyObservation], frozen=True, kw_only=True, tag_field="waits_for"):
    """What to wait for, and how long. Plain data without secrets. Times are Unix seconds.

    - `conn_id`: the Airflow connection.
    - `until`: the end of the wait; `wait_timeout_s` is its length, for messages.
    - `deadline`: the end of the task's `execution_timeout`, None for none.
    - `began_at`: the start of the DAG run; a job that failed earlier is another run's.
    - `because`: the reason of a resize, for the result; else empty.
    - `seen`: the job or pool has been seen, so its absence means that it has ended.
    """

    needs_client: ClassVar[bool] = True
    timeout_is: ClassVar[Any] = "not_yet"

    conn_id: str
    until: float
    wait_timeout_s: float
    deadline: float | None = None
    began_at: float = 0.0
    because: str = ""
    seen: bool = False

    @property
    def about(self) -> str:
        """The name of the target."""
        raise NotImplementedError

    async def observe(self, client: EdlClient, now: float) -> AnyObservation:
        """Observe once. An outage of Redis is part of the observation. Raises BackendError."""
        raise NotImplementedError

    def check(self, view: AnyObservation) -> TaskOutcome | None:
        """Return the outcome by this observation, None to keep waiting."""
        raise NotImplementedError

    def missing(self, view: AnyObservation) -> str:
        """Return what is missing, in words."""
        raise NotImplementedError

    def on_timeout(self, view: AnyObservation) -> TaskOutcome:
        """Return the outcome when the time is up, with what is missing."""
        missing = "Redis does not answer" if view.trouble else self.missing(view)
        return TaskOutcome(ended=self.timeout_is, name=self.about, reason=missing)

    def after(self, view: AnyObservation) -> Self:
        """Return the condition for the next observation."""
        return msgspec.structs.replace(self, seen=True) if view.job else self

    def pause_s(self, view: AnyObservation, now: float) -> float:  # noqa: ARG002 (a condition of time needs them)
        """Return the seconds until the next observation."""
        return POLL_INTERVAL_S


def evaluate(condition: Condition[Any], view: Observation, now: float) -> TaskOutcome | None:
    """Return the outcome, None to keep waiting. A condition that is true counts even if the time is up."""
    outcome = condition.check(view)
    if outcome is None and condition.deadline is not None and now >= condition.deadline:
        outcome = TaskOutcome(ended="timed_out", name=condition.about)
    if outcome is None and now >= condition.until:
        outcome = condition.on_timeout(view)
    return outcome


async def wait_for(condition: Condition[Any], client: Any, log: LogFunction) -> TaskOutcome:
    """Observe until the wait has ended. Tolerates a Redis outage. Raises BackendError.

    `client` is an `EdlClient`, or None for a condition that needs none.
    """
    trouble = ""
    while True:
        view: Observation = await condition.observe(client, clock())
        now = clock()
        if outcome := evaluate(condition, view, now):
            return outcome
        condition = condition.after(view)
        if view.trouble and not trouble:
            log(f"{view.trouble}. Waiting for it")
        trouble = view.trouble
        await asyncio.sleep(condition.pause_s(view, now))


def count_text(at_least: int, at_most: int | None) -> str:
    """Return how many are wanted, in words."""
    return f"{at_least} or more" if at_most is None else f"{at_least}"


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
        outcome = evaluate(condition, view, clock())
        self._condition = condition.after(view)
        if outcome is None or outcome.ended in {"no_teacher", "not_yet", "timed_out"}:  # Airflow applies the timeout
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
                return await condition.observe(client, clock())

        if condition.needs_client:
            seen: Observation = asyncio.run(observe(EdlHook(self.edl_conn_id).edl_connection()))
        else:
            client: Any = None
            seen = asyncio.run(condition.observe(client, clock()))
        return seen

    def _log_missing(self, condition: Condition[Any], view: Observation) -> None:
        """Log what is missing, once, and again when that changes."""
        missing = f"Waiting for {condition.about!r}: {condition.on_timeout(view).reason}"
        if missing != self._logged and not view.trouble:
            self.log.info("%s", missing)
        self._logged = missing

    def _defer(self) -> NoReturn:
        from edl_airflow.triggers.task import EdlConditionTrigger

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
