"""What all operators share: templates inside specs, and doing the work in a worker or a triggerer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import msgspec
from airflow.sdk import BaseOperator

from edl_airflow import conductor
from edl_airflow.failures import TaskKilledError, failing_clearly, failure_of
from edl_airflow.hooks.edl import EdlHook, Site, Surroundings, open_site
from edl_airflow.identity import try_token
from edl_airflow.links import push_links
from edl_airflow.work import Outcome, Work
from edl_runtime.errors import SpecError
from edl_runtime.specs import Bounds

if TYPE_CHECKING:
    import jinja2
    from airflow.sdk import Context

Result = TypeVar("Result")
Struct = TypeVar("Struct", bound=msgspec.Struct)


def has_template(value: object) -> bool:
    """Whether `value`, a string or a spec, holds what is only known when the task runs."""
    if isinstance(value, msgspec.Struct):
        return has_template(msgspec.to_builtins(value))
    if isinstance(value, dict):
        return any(map(has_template, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_template, value))
    if isinstance(value, str):
        return "{{" in value or "{%" in value
    return hasattr(value, "resolve")  # an XComArg


def as_bounds(value: object) -> Bounds:
    """Return what "1:3", "2", 2 or a Bounds says. Raises SpecError."""
    return value if isinstance(value, Bounds) else Bounds.parse(str(value))


def as_count(field: str, value: object) -> int:
    """Return the whole number, 1 or more, that `value` (a number or its text) says. Raises SpecError naming `field`."""
    try:
        count = int(str(value))
    except ValueError:
        count = 0
    if count < 1:
        raise SpecError(field, value, "a whole number, 1 or more")
    return count


class SpecTemplates(BaseOperator):
    """Renders templates inside spec structs, which are frozen: each is taken apart, rendered and made anew."""

    def render_template(
        self,
        content: Any,
        context: Context,
        jinja_env: jinja2.Environment | None = None,
        seen_oids: set[int] | None = None,
    ) -> Any:
        """Render `content` as Airflow does, specs included. Raises SpecError for a spec that can't work."""
        if not isinstance(content, msgspec.Struct):
            return super().render_template(content, context, jinja_env, seen_oids)
        rendered = super().render_template(msgspec.to_builtins(content), context, jinja_env, seen_oids)
        with failing_clearly():
            return _made(type(content), rendered)


class EdlOperator(SpecTemplates):
    """Does a `Work`, in this process or in a triggerer, and leaves nothing behind however it ends.

    Subclasses say what the work is (`plan`) and what to return when it is done (`result`).
    """

    keeps_pool: ClassVar[bool] = False
    """Whether what was started outlives a task that succeeds."""

    edl_conn_id: str
    deferrable: bool
    _surroundings: Surroundings
    _work: Work | None = None
    _cancel: Callable[[], object] | None = None
    _killed = False

    def plan(self, context: Context, namespace: str) -> Work:
        """Say what to do, from the rendered fields. Raises SpecError."""
        raise NotImplementedError

    def result(self, work: Work, outcome: Outcome) -> Any:
        """Return the XCom of a task that has succeeded."""
        raise NotImplementedError

    def execute(self, context: Context) -> Any:
        """Start the work; then follow it to its end, or defer unless it has ended already."""
        with failing_clearly():
            self._surroundings = EdlHook(self.edl_conn_id).surroundings()
            work = self.plan(context, self._surroundings.namespace)
        push_links(self, context)
        outcome = self._run(work, self._begin)
        return self._finish(work, outcome) if outcome else self._hand_over(work, context)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:  # noqa: ARG002
        """Finish what the triggerer followed, on an operator that has never executed."""
        with failing_clearly():
            self._surroundings = EdlHook(self.edl_conn_id).surroundings()
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

    def folder(self) -> Path:
        """Return the folder of the DAG's file, which relative paths in specs start from."""
        return Path(self.dag.fileloc).absolute().parent if self.has_dag() else Path.cwd()  # type: ignore[no-untyped-call]

    def deadline(self) -> float | None:
        """Return when `execution_timeout` is over for a task that starts now; Airflow forgets it on deferral."""
        return time.time() + self.execution_timeout.total_seconds() if self.execution_timeout else None

    def token(self, context: Context) -> str:
        return try_token(context["ti"])

    async def _begin(self, work: Work, site: Site) -> Outcome | None:
        outcome = await conductor.begin(work, site)
        if outcome is None and not self.deferrable:
            outcome = await conductor.conduct(work, site, self.log.info)
        return outcome

    def _hand_over(self, work: Work, context: Context) -> NoReturn:
        """Defer, unless the task has been ended meanwhile: Airflow would refuse, and nobody would stop the work."""
        from edl_airflow.triggers.job import EdlJobTrigger

        wanted = False
        try:
            wanted = _is_running(context["ti"])
        finally:
            if not wanted:
                self._run(work, conductor.stop)
        if not wanted:
            raise TaskKilledError
        self._work = None  # from here on it is the trigger's
        self.defer(trigger=EdlJobTrigger(work=msgspec.to_builtins(work)), method_name="execute_complete")

    def _finish(self, work: Work, outcome: Outcome) -> Any:
        failure = failure_of(outcome, work.waits_s)
        if failure or not self.keeps_pool:
            self._run(work, conductor.stop)
        self._work = None
        if failure:
            raise failure
        return self.result(work, outcome)

    def _run(self, work: Work, do: Callable[[Work, Site], Awaitable[Result]]) -> Result:
        """Do something. If it fails or the task is killed meanwhile, everything of this try is stopped."""
        self._work = work
        with failing_clearly():
            try:
                return asyncio.run(self._guarded(work, do))
            except asyncio.CancelledError:
                raise TaskKilledError from None

    async def _guarded(self, work: Work, do: Callable[[Work, Site], Awaitable[Result]]) -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel) if task else None
        try:
            return await self._unless_killed(work, do)
        except BaseException:
            self._cancel = None  # a second signal must not stop the stopping
            await self._stop(work)
            raise
        finally:
            self._cancel = None

    async def _unless_killed(self, work: Work, do: Callable[[Work, Site], Awaitable[Result]]) -> Result:
        if self._killed:  # before there was anything to cancel
            raise asyncio.CancelledError
        async with open_site(self._surroundings) as site:
            return await do(work, site)

    async def _stop(self, work: Work) -> None:
        async with open_site(self._surroundings) as site:
            await conductor.stop(work, site)


def _is_running(ti: Any) -> bool:
    states = ti.get_task_states(dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index)
    return all(state == "running" for state in states.get(ti.run_id, {}).values())


def _made(struct: type[Struct], plain: Any) -> Struct:
    try:
        return msgspec.convert(plain, struct, strict=False)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, SpecError):
            raise error.__cause__ from None
        raise SpecError(struct.__name__, plain, f"what its fields take: {error}") from None
