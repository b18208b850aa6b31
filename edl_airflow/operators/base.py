"""What the operators that start something share: they do their work in a worker or a triggerer."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import msgspec

from edl_airflow.client import backend_for, open_client
from edl_airflow.connection import EdlConnection
from edl_airflow.failures import TaskKilledError, error_for, failing_without_retry
from edl_airflow.hooks.edl import EdlHook
from edl_airflow.identity import owner
from edl_airflow.links import push_links
from edl_airflow.operators.templates import TemplatedOperator, dag_folder
from edl_airflow.runtime import runner
from edl_airflow.runtime.decisions import result_warnings
from edl_airflow.runtime.spec import BackendRef, KubernetesBackendRef, TaskOutcome, TaskSpec
from edl_runtime.backends.interface import token_owner

if TYPE_CHECKING:
    from airflow.sdk import Context

Result = TypeVar("Result")


class EdlOperator(TemplatedOperator):
    """Does a `TaskSpec`, in this process or in a triggerer, and leaves nothing behind however it ends.

    Subclasses say what the work is (`plan`) and what to return when it is done (`result`).
    """

    keeps_pool: ClassVar[bool] = False
    """Whether what was started outlives a task that succeeds."""

    edl_conn_id: str
    deferrable: bool
    _spec: TaskSpec | None = None
    _started = True  # whether this try has taken over what earlier ones left; the second half of a deferred task has
    _cancel: Callable[[], object] | None = None
    _killed = False

    def plan(self, context: Context, edl_connection: EdlConnection) -> TaskSpec:
        """Say what to do, from the rendered fields. Raises SpecError."""
        raise NotImplementedError

    def check(self, folder: Path) -> None:
        """Raise SpecError or ModelError for what this machine's files show to be wrong.

        `folder`: which relative paths start from.
        """
        raise NotImplementedError

    def result(self, spec: TaskSpec, outcome: TaskOutcome) -> Any:
        """Return the XCom of a task that has succeeded."""
        raise NotImplementedError

    def execute(self, context: Context) -> Any:
        """Start the work; then follow it to its end, or defer unless it has ended already."""
        with failing_without_retry():
            edl_connection = EdlHook(self.edl_conn_id).edl_connection()
            try:
                spec = self.plan(context, edl_connection)
                push_links(self, context)
            except Exception:  # an earlier try's plan may have worked
                asyncio.run(runner.stop_all_tries(owner(context["ti"]), backend_for(edl_connection.place)))
                raise
        self._started = False
        done = self._run(spec, lambda: self._begin(spec, edl_connection))
        return self._finish(spec, done) if isinstance(done, TaskOutcome) else self._defer_to_trigger(done, context)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:  # noqa: ARG002
        """Finish what the triggerer followed, on an operator that has never executed."""
        return self._finish(msgspec.convert(event["spec"], TaskSpec), msgspec.convert(event, TaskOutcome))

    def on_kill(self) -> None:
        """End this try's work, from a signal handler: by cancelling the loop that does it, if there is one.

        Talks to no Airflow service: the code that was interrupted may be in the middle of that.
        """
        self._killed = True
        if self._cancel:
            self._cancel()
        elif self._spec:
            thread = threading.Thread(target=asyncio.run, args=[self._stop(self._spec)])
            thread.start()
            thread.join()

    def folder(self, place: BackendRef) -> Path | None:
        """Return the folder of the DAG's file, which relative paths in specs start from; None where pods have none."""
        return None if isinstance(place, KubernetesBackendRef) else dag_folder(self)

    async def _begin(self, spec: TaskSpec, edl_connection: EdlConnection) -> TaskOutcome | TaskSpec:
        if self._killed:  # before there was anything to cancel
            raise asyncio.CancelledError
        async with open_client(edl_connection) as client:
            folder = self.folder(spec.place)
            started = await runner.start(spec, client, partial(self.check, folder) if folder else None)
            self._started = True
            if isinstance(started, TaskOutcome) or self.deferrable:
                return started
            return await runner.run(started, client, self.log.info)

    def _defer_to_trigger(self, spec: TaskSpec, context: Context) -> NoReturn:
        """Defer, unless the task has been ended meanwhile: Airflow would refuse, and nobody would stop the work."""
        from edl_airflow.triggers.task import EdlTaskTrigger

        wanted = False
        try:
            wanted = _is_running(context["ti"]) and not self._killed
        finally:
            if not wanted:
                self._run(spec, lambda: self._stop(spec))
        if not wanted:
            raise TaskKilledError
        self._spec = None  # from here on it is the trigger's
        self.defer(trigger=EdlTaskTrigger(spec=msgspec.to_builtins(spec)), method_name="execute_complete")

    def _finish(self, spec: TaskSpec, outcome: TaskOutcome) -> Any:
        failure = error_for(outcome, spec.wait_timeout_s)
        if failure or not self.keeps_pool:
            self._run(spec, lambda: self._stop(spec))
        self._spec = None
        if failure:
            raise failure
        for doubt in result_warnings(spec, outcome):
            self.log.warning(doubt)
        return self.result(spec, outcome)

    def _run(self, spec: TaskSpec, do: Callable[[], Awaitable[Result]]) -> Result:
        """Do something. If it fails or the task is killed meanwhile, everything of this try is stopped.

        Not so if it can't tell Airflow anything any more, because its worker is lost: the next try takes over then.
        """
        self._spec = spec
        with failing_without_retry():
            try:
                return asyncio.run(self._guarded(spec, do))
            except asyncio.CancelledError:
                raise TaskKilledError from None

    async def _guarded(self, spec: TaskSpec, do: Callable[[], Awaitable[Result]]) -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel) if task else None
        worker = os.getppid()
        try:
            return await do()
        except BaseException as error:
            self._cancel = None  # a second signal must not stop the stopping
            if not (isinstance(error, OSError) and os.getppid() != worker):
                await self._stop(spec)
            raise
        finally:
            self._cancel = None

    async def _stop(self, spec: TaskSpec) -> None:
        """Stop this try's work; before this try has taken over what earlier ones left, that as well."""
        backend = await asyncio.to_thread(backend_for, spec.place)
        if self._started:
            await runner.stop(spec, backend)
        else:
            await runner.stop_all_tries(token_owner(spec.token), backend)


def _is_running(ti: Any) -> bool:
    states = ti.get_task_states(dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index)
    return all(state == "running" for state in states.get(ti.run_id, {}).values())
