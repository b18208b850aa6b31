"""Waits for a pool's teachers and students."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from airflow.sdk import BaseSensorOperator, PokeReturnValue, conf
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout, AirflowSkipException

from edl_airflow.failures import failing_clearly, failure_of
from edl_airflow.hooks.edl import DEFAULT_CONN_ID, EdlHook, Surroundings
from edl_airflow.operators.base import task_deadline
from edl_airflow.operators.templates import TextTemplates, as_count, has_template
from edl_airflow.pool_wait import PoolView, PoolWait, judge, look
from edl_airflow.site import open_site
from edl_airflow.work import Outcome, PoolResult
from edl_runtime.errors import NoTeacherError, SpecError
from edl_runtime.specs import check_name

if TYPE_CHECKING:
    from airflow.sdk import Context


class EdlTeacherPoolSensor(TextTemplates, BaseSensorOperator):
    """Succeed when a pool has at least so many registered teachers, and so many students attached to it.

    Returns a `PoolResult`. Fails at once when the pool itself has failed, or was there and has ended; with `soft_fail`
    it is skipped then, as Airflow's sensors are. Deferrable, it needs a worker only to look once and to finish.
    `timeout` (seconds) limits the wait, `poke_interval` is 5 s unless given. A Redis that is away is waited for.
    In mode `reschedule` each look is a first one, so a pool that has ended is waited for like one that has yet to come.

    :param teacher_pool: the pool's name (templated)
    :param at_least: how many teachers (templated)
    :param students: how many students, 0 for any number
    :param edl_conn_id: the Airflow connection of type `edl` (templated)
    :param deferrable: wait in the triggerer, without a worker slot
    """

    template_fields: Sequence[str] = ("teacher_pool", "at_least", "edl_conn_id")
    ui_color = "#ead1dc"
    _wait: PoolWait | None = None

    def __init__(
        self,
        *,
        teacher_pool: str,
        at_least: int | str = 1,
        students: int = 0,
        edl_conn_id: str = DEFAULT_CONN_ID,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        poke_interval: float = 5,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.teacher_pool = teacher_pool
        self.at_least = at_least
        self.students = students
        self.edl_conn_id = edl_conn_id
        self.deferrable = deferrable
        if not has_template(teacher_pool):
            check_name("teacher_pool", teacher_pool)
        if not has_template(at_least):
            as_count("at_least", at_least)
        if not isinstance(students, int) or students < 0:
            raise SpecError("students", students, "a whole number, 0 or more")

    def execute(self, context: Context) -> Any:
        """Wait in this process, or look once and defer."""
        self._wait = None
        if not self.deferrable:
            return super().execute(context)
        try:
            done = self.poke(context)
        except AirflowFailException as error:
            if self.soft_fail:
                raise AirflowSkipException(str(error)) from error
            raise
        return done.xcom_value if done else self._defer()

    def poke(self, context: Context) -> PokeReturnValue:  # noqa: ARG002
        """Look once."""
        with failing_clearly():
            self._wait = self._wait or self._new_wait()
            view = asyncio.run(_look(self._wait, EdlHook(self.edl_conn_id).surroundings()))
        if view.trouble:
            self.log.warning("%s. Waiting for it", view.trouble)
        outcome = judge(self._wait, view, time.time())
        self._wait = self._wait.after(view)
        if outcome is None or outcome.ended in {"no_teacher", "timed_out"}:  # whether time is up is Airflow's to say
            return PokeReturnValue(is_done=False)
        return PokeReturnValue(is_done=True, xcom_value=self._result(self._wait, outcome))

    def execute_complete(self, context: Context, event: dict[str, Any]) -> PoolResult:  # noqa: ARG002
        """Finish what the triggerer waited for, on a sensor that has never executed."""
        return self._result(msgspec.convert(event["wait"], PoolWait), msgspec.convert(event, Outcome))

    def _new_wait(self) -> PoolWait:
        return PoolWait(
            conn_id=self.edl_conn_id,
            pool=check_name("teacher_pool", self.teacher_pool),
            at_least=as_count("at_least", self.at_least),
            students=self.students,
            waits_s=self.timeout,
            pool_deadline=time.time() + self.timeout,
            deadline=task_deadline(self),
        )

    def _defer(self) -> NoReturn:
        from edl_airflow.triggers.teacher_pool import EdlTeacherPoolTrigger

        self.defer(trigger=EdlTeacherPoolTrigger(wait=msgspec.to_builtins(self._wait)), method_name="execute_complete")

    def _result(self, wait: PoolWait, outcome: Outcome) -> PoolResult:
        failure = failure_of(outcome, wait.waits_s)
        if isinstance(failure, NoTeacherError):
            raise AirflowSensorTimeout(str(failure)) from failure
        if failure:
            raise failure
        return PoolResult(pool=wait.pool, teachers=list(outcome.teachers))


async def _look(wait: PoolWait, surroundings: Surroundings) -> PoolView:
    async with open_site(surroundings) as site:
        return await look(wait, site)
