"""What the sensors share: they look in a worker, or in a triggerer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import msgspec
from airflow.sdk import BaseSensorOperator, PokeReturnValue
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout, AirflowSkipException

from edl_airflow.failures import NotInTimeError, failing_clearly, failure_of
from edl_airflow.hooks.edl import EdlHook, Surroundings
from edl_airflow.operators.base import run_start
from edl_airflow.operators.templates import TextTemplates
from edl_airflow.site import open_site
from edl_airflow.waiting import View, Wait, judge
from edl_airflow.work import Outcome
from edl_runtime.errors import NoTeacherError

if TYPE_CHECKING:
    from airflow.sdk import Context

    from edl_airflow.triggers.base import EdlTrigger

AnyWait = TypeVar("AnyWait", bound=Wait[Any])

POKE_EVERY_S = 5


class EdlSensor(TextTemplates, BaseSensorOperator, Generic[AnyWait]):
    """Looks until a wait has ended. Deferrable, it needs a worker only to look once and to finish.

    Fails at once when what is waited for can't come any more; with `soft_fail` or `never_fail` it is skipped then.
    `timeout` (seconds) limits the wait, `poke_interval` is 5 s unless given. A Redis that is away is waited for.
    In mode `reschedule` each look is a first one, so what has ended and left no word is waited for like what has yet to
    come.

    Subclasses say what is waited for (`new_wait`) and what to return when it is there (`result`).
    """

    edl_conn_id: str
    deferrable: bool
    _wait: AnyWait | None = None
    _said: str = ""

    def __init__(self, *, poke_interval: float = POKE_EVERY_S, **kwargs: Any) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)

    def new_wait(self, until: float) -> AnyWait:
        """Say what to wait for, from the rendered fields. Raises SpecError."""
        raise NotImplementedError

    def result(self, outcome: Outcome) -> Any:
        """Return the XCom of a wait that has ended well."""
        raise NotImplementedError

    def look(self, wait: AnyWait) -> View:
        """Look once."""
        return asyncio.run(_look(wait, EdlHook(self.edl_conn_id).surroundings()))

    def trigger(self, wait: AnyWait) -> EdlTrigger:
        """Return what goes on with the wait in the triggerer."""
        from edl_airflow.triggers.wait import EdlWaitTrigger

        return EdlWaitTrigger(wait=msgspec.to_builtins(wait))

    def execute(self, context: Context) -> Any:
        """Wait in this process, or look once and defer."""
        self._wait = None
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
        with failing_clearly():
            self._wait = self._wait or msgspec.structs.replace(
                self.new_wait(time.time() + self.timeout), began_at=run_start(context).timestamp()
            )
            view = self.look(self._wait)
        if view.trouble:
            self.log.warning("%s. Waiting for it", view.trouble)
        outcome = judge(self._wait, view, time.time())
        self._wait = self._wait.after(view)
        if outcome is None or outcome.ended in {"no_teacher", "not_yet", "timed_out"}:  # that is Airflow's to say
            self._tell(self._wait, view)
            return PokeReturnValue(is_done=False)
        return PokeReturnValue(is_done=True, xcom_value=self._finish(outcome))

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:  # noqa: ARG002
        """Finish what the triggerer waited for, on a sensor that has never executed."""
        return self._finish(msgspec.convert(event, Outcome))

    @property
    def _is_lenient(self) -> bool:
        return self.soft_fail or self.never_fail

    def _tell(self, wait: AnyWait, view: View) -> None:
        """Log what is waited for, and what lacks; once, and again when that changes."""
        lacks = f"Waiting for {wait.about!r}: {wait.given_up(view).reason}"
        if lacks != self._said and not view.trouble:
            self.log.info("%s", lacks)
        self._said = lacks

    def _defer(self) -> NoReturn:
        assert self._wait is not None  # noqa: S101 (`poke` has made it)
        self.defer(trigger=self.trigger(self._wait), method_name="execute_complete")

    def _finish(self, outcome: Outcome) -> Any:
        failure = failure_of(outcome, self.timeout)
        if isinstance(failure, NoTeacherError | NotInTimeError):
            failure = AirflowSensorTimeout(str(failure))
        if failure and self._is_lenient:
            raise AirflowSkipException(str(failure)) from failure
        if failure:
            raise failure
        return self.result(outcome)


async def _look(wait: Wait[Any], surroundings: Surroundings) -> View:
    async with open_site(surroundings) as site:
        seen: View = await wait.look(site)
    return seen
