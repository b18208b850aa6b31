"""Changes how many teachers a pool has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from airflow.sdk import BaseOperatorLink, conf
from airflow.sdk.exceptions import AirflowSkipException

from edl_airflow.failures import PoolEndedError, failing_clearly, failure_of
from edl_airflow.hooks.edl import DEFAULT_CONN_ID, EdlHook, Surroundings
from edl_airflow.links import TeacherPoolLink, push_links
from edl_airflow.operators.base import task_deadline
from edl_airflow.operators.templates import TextTemplates, as_count, check_seconds, has_template
from edl_airflow.pool_wait import PoolWait, judge, look, wait_for_pool
from edl_airflow.site import Site, open_site
from edl_airflow.work import Outcome, PoolResult
from edl_runtime.errors import UnknownJobError
from edl_runtime.specs import check_name

if TYPE_CHECKING:
    from airflow.sdk import Context


class EdlResizeOperator(TextTemplates):
    """Change the number of a running pool's teachers, within its bounds; students use them without a restart.

    Returns a `PoolResult`: the teachers that are registered when the pool has its new size. A failed or killed task
    does not take the wish back. Where the pool has ended already, or ends meanwhile, the task is skipped; a name that
    no pool ever had is an error.

    :param teacher_pool: the pool's name (templated)
    :param instances: the wanted number of teachers (templated)
    :param wait: succeed only when exactly so many teachers are registered
    :param wait_timeout_s: seconds to wait for that before the task fails
    :param edl_conn_id: the Airflow connection of type `edl` (templated)
    :param deferrable: wait in the triggerer, without a worker slot
    """

    template_fields: Sequence[str] = ("teacher_pool", "instances", "edl_conn_id")
    operator_extra_links: Sequence[BaseOperatorLink] = (TeacherPoolLink(),)
    ui_color = "#fff2cc"

    def __init__(
        self,
        *,
        teacher_pool: str,
        instances: int | str,
        wait: bool = True,
        wait_timeout_s: float = 120,
        edl_conn_id: str = DEFAULT_CONN_ID,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.teacher_pool = teacher_pool
        self.instances = instances
        self.wait = wait
        self.wait_timeout_s = wait_timeout_s
        self.edl_conn_id = edl_conn_id
        self.deferrable = deferrable
        if not has_template(teacher_pool):
            check_name("teacher_pool", teacher_pool)
        if not has_template(instances):
            as_count("instances", instances)
        check_seconds("wait_timeout_s", wait_timeout_s)

    def execute(self, context: Context) -> PoolResult:
        """Resize the pool; then wait for its teachers, or defer unless they are there already."""
        with failing_clearly():
            surroundings = EdlHook(self.edl_conn_id).surroundings()
            instances = as_count("instances", self.instances)
            wait = PoolWait(
                conn_id=self.edl_conn_id,
                pool=check_name("teacher_pool", self.teacher_pool),
                at_least=instances,
                at_most=instances,
                waits_s=self.wait_timeout_s,
                pool_deadline=time.time() + self.wait_timeout_s,
                deadline=task_deadline(self),
                seen=True,
            )
            push_links(self, context)
            outcome = asyncio.run(self._resize(wait, instances, surroundings))
        return self._result(wait, outcome) if outcome else self._defer(wait)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> PoolResult:  # noqa: ARG002
        """Finish what the triggerer waited for, on an operator that has never executed."""
        return self._result(msgspec.convert(event["wait"], PoolWait), msgspec.convert(event, Outcome))

    async def _resize(self, wait: PoolWait, instances: int, surroundings: Surroundings) -> Outcome | None:
        async with open_site(surroundings) as site:
            try:
                await site.backend.resize(wait.pool, instances)
            except UnknownJobError:
                if not await _was_there(wait.pool, site):
                    raise
                return Outcome(ended="gone", name=wait.pool)
            self.log.info("Pool %r shall have %d teachers", wait.pool, instances)
            if not self.wait:
                teachers = tuple(await site.teachers(wait.pool))
                return Outcome(ended="ready", name=wait.pool, teachers=teachers)
            if self.deferrable:
                return judge(wait, await look(wait, site), time.time())
            return await wait_for_pool(wait, site, self.log.info)

    def _defer(self, wait: PoolWait) -> NoReturn:
        from edl_airflow.triggers.teacher_pool import EdlTeacherPoolTrigger

        self.defer(trigger=EdlTeacherPoolTrigger(wait=msgspec.to_builtins(wait)), method_name="execute_complete")

    def _result(self, wait: PoolWait, outcome: Outcome) -> PoolResult:
        failure = failure_of(outcome, wait.waits_s)
        if isinstance(failure, PoolEndedError):
            raise AirflowSkipException(f"{failure}; there is nothing to resize") from failure
        if failure:
            raise failure
        return PoolResult(pool=wait.pool, teachers=list(outcome.teachers))


async def _was_there(pool: str, site: Site) -> bool:
    """Whether there was such a pool before: its log outlives it."""
    try:
        async for _ in site.backend.logs(pool, tail=1):
            break
    except UnknownJobError:
        return False
    return True
