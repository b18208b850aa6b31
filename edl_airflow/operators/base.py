"""What the operators that start something share: they do their work in a worker or a triggerer."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import msgspec
from airflow.sdk import BaseOperator

from edl_airflow import conductor
from edl_airflow.decisions import doubts
from edl_airflow.failures import TaskKilledError, failing_clearly, failure_of
from edl_airflow.hooks.edl import EdlHook, Surroundings
from edl_airflow.identity import owner
from edl_airflow.links import push_links
from edl_airflow.operators.templates import TextTemplates, dag_folder
from edl_airflow.site import backend_at, open_site
from edl_airflow.work import KubernetesPlace, Outcome, Place, Work
from edl_runtime.backends.base import owner_of

if TYPE_CHECKING:
    from airflow.sdk import Context

Result = TypeVar("Result")


def task_deadline(operator: BaseOperator) -> float | None:
    """Return when `execution_timeout` is over for a task that starts now; Airflow forgets it on deferral."""
    limit = operator.execution_timeout
    return time.time() + limit.total_seconds() if limit else None


def run_start(context: Context) -> datetime:
    """Return when the DAG's run has started: the same in every try, until somebody clears a run that has ended."""
    run: Any = context.get("dag_run")
    return (run.start_date if run else None) or datetime.now(UTC)


class EdlOperator(TextTemplates):
    """Does a `Work`, in this process or in a triggerer, and leaves nothing behind however it ends.

    Subclasses say what the work is (`plan`) and what to return when it is done (`result`).
    """

    keeps_pool: ClassVar[bool] = False
    """Whether what was started outlives a task that succeeds."""

    edl_conn_id: str
    deferrable: bool
    _work: Work | None = None
    _begun = True  # whether this try has taken over what earlier ones left; the second half of a deferred task has
    _cancel: Callable[[], object] | None = None
    _killed = False

    def plan(self, context: Context, surroundings: Surroundings) -> Work:
        """Say what to do, from the rendered fields. Raises SpecError."""
        raise NotImplementedError

    def check(self, folder: Path) -> None:
        """Raise SpecError or ModelError for what this machine's files show to be wrong.

        `folder`: which relative paths start from.
        """
        raise NotImplementedError

    def result(self, work: Work, outcome: Outcome) -> Any:
        """Return the XCom of a task that has succeeded."""
        raise NotImplementedError

    def execute(self, context: Context) -> Any:
        """Start the work; then follow it to its end, or defer unless it has ended already."""
        with failing_clearly():
            surroundings = EdlHook(self.edl_conn_id).surroundings()
            try:
                work = self.plan(context, surroundings)
                push_links(self, context)
            except Exception:  # an earlier try's plan may have worked
                asyncio.run(conductor.stop_all_tries(owner(context["ti"]), backend_at(surroundings.place)))
                raise
        self._begun = False
        done = self._run(work, lambda: self._begin(work, surroundings))
        return self._finish(work, done) if isinstance(done, Outcome) else self._hand_over(done, context)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:  # noqa: ARG002
        """Finish what the triggerer followed, on an operator that has never executed."""
        return self._finish(msgspec.convert(event["work"], Work), msgspec.convert(event, Outcome))

    def on_kill(self) -> None:
        """End this try's work, from a signal handler: by cancelling the loop that does it, if there is one.

        Talks to no Airflow service: the code that was interrupted may be in the middle of that.
        """
        self._killed = True
        if self._cancel:
            self._cancel()
        elif self._work:
            thread = threading.Thread(target=asyncio.run, args=[self._stop(self._work)])
            thread.start()
            thread.join()

    def folder(self, place: Place) -> Path | None:
        """Return the folder of the DAG's file, which relative paths in specs start from; None where pods have none."""
        return None if isinstance(place, KubernetesPlace) else dag_folder(self)

    async def _begin(self, work: Work, surroundings: Surroundings) -> Outcome | Work:
        if self._killed:  # before there was anything to cancel
            raise asyncio.CancelledError
        async with open_site(surroundings) as site:
            folder = self.folder(work.place)
            begun = await conductor.begin(work, site, partial(self.check, folder) if folder else None)
            self._begun = True
            if isinstance(begun, Outcome) or self.deferrable:
                return begun
            return await conductor.conduct(begun, site, self.log.info)

    def _hand_over(self, work: Work, context: Context) -> NoReturn:
        """Defer, unless the task has been ended meanwhile: Airflow would refuse, and nobody would stop the work."""
        from edl_airflow.triggers.job import EdlJobTrigger

        wanted = False
        try:
            wanted = _is_running(context["ti"]) and not self._killed
        finally:
            if not wanted:
                self._run(work, lambda: self._stop(work))
        if not wanted:
            raise TaskKilledError
        self._work = None  # from here on it is the trigger's
        self.defer(trigger=EdlJobTrigger(work=msgspec.to_builtins(work)), method_name="execute_complete")

    def _finish(self, work: Work, outcome: Outcome) -> Any:
        failure = failure_of(outcome, work.waits_s)
        if failure or not self.keeps_pool:
            self._run(work, lambda: self._stop(work))
        self._work = None
        if failure:
            raise failure
        for doubt in doubts(work, outcome):
            self.log.warning(doubt)
        return self.result(work, outcome)

    def _run(self, work: Work, do: Callable[[], Awaitable[Result]]) -> Result:
        """Do something. If it fails or the task is killed meanwhile, everything of this try is stopped.

        Not so if it can't tell Airflow anything any more, because its worker is lost: the next try takes over then.
        """
        self._work = work
        with failing_clearly():
            try:
                return asyncio.run(self._guarded(work, do))
            except asyncio.CancelledError:
                raise TaskKilledError from None

    async def _guarded(self, work: Work, do: Callable[[], Awaitable[Result]]) -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel) if task else None
        worker = os.getppid()
        try:
            return await do()
        except BaseException as error:
            self._cancel = None  # a second signal must not stop the stopping
            if not (isinstance(error, OSError) and os.getppid() != worker):
                await self._stop(work)
            raise
        finally:
            self._cancel = None

    async def _stop(self, work: Work) -> None:
        """Stop this try's work; before this try has taken over what earlier ones left, that as well."""
        backend = await asyncio.to_thread(backend_at, work.place)
        if self._begun:
            await conductor.stop(work, backend)
        else:
            await conductor.stop_all_tries(owner_of(work.token), backend)


def _is_running(ti: Any) -> bool:
    states = ti.get_task_states(dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index)
    return all(state == "running" for state in states.get(ti.run_id, {}).values())
