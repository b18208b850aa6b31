"""Base of the operators that start jobs or pools, in a worker or a triggerer."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import msgspec

from edl_airflow.backends import backend_for
from edl_airflow.client import open_client
from edl_airflow.failures import TaskKilledError, error_for, failing_without_retry
from edl_airflow.hooks.edl import EdlConnection, EdlHook
from edl_airflow.identity import owner
from edl_airflow.links import push_links
from edl_airflow.operators.templates import TemplatedOperator, dag_folder
from edl_airflow.orphans import origin_of
from edl_airflow.runtime import runner
from edl_airflow.runtime.decisions import result_warnings, unneeded_jobs
from edl_airflow.runtime.spec import BackendRef, KubernetesBackendRef, TaskOutcome, TaskSpec
from edl_airflow.task_state import ShownState
from edl_runtime.backends.interface import token_owner

if TYPE_CHECKING:
    from airflow.sdk import Context

Result = TypeVar("Result")

LOOKS_FOR_END, LOOK_AGAIN_S = 100, 0.05
"""How often, and every how many seconds, it is looked whether a worker whose connections have ended has ended, too."""


class EdlOperator(TemplatedOperator):
    """Runs a `TaskSpec`, in this process or in a triggerer, and stops what it has started however it ends.

    Subclasses define the work (`plan`), checks before it starts (`check`) and the task's `result`.
    """

    keeps_pool: ClassVar[bool] = False
    """Whether the pool outlives a task that succeeds."""

    edl_conn_id: str
    deferrable: bool
    _spec: TaskSpec | None = None
    _shown = ShownState(None)
    _started = True  # whether this try has adopted earlier tries' jobs; after a deferral it has
    _cancel: Callable[[], object] | None = None
    _killed = False

    def plan(self, context: Context, edl_connection: EdlConnection) -> TaskSpec:
        """Return the work, by the rendered fields. Raises SpecError."""
        raise NotImplementedError

    def check(self, folder: Path) -> None:
        """Raise SpecError or ModelError for mistakes that this machine's files show. `folder` is for relative paths."""
        raise NotImplementedError

    def result(self, spec: TaskSpec, outcome: TaskOutcome) -> Any:
        """Return the XCom of a task that has succeeded."""
        raise NotImplementedError

    def execute(self, context: Context) -> Any:
        """Start the work; then follow it to its end, or defer."""
        with failing_without_retry():
            edl_connection = EdlHook(self.edl_conn_id).edl_connection()
            try:
                spec = self.plan(context, edl_connection)
                spec = msgspec.structs.replace(spec, origin=origin_of(context["ti"], outlives_task=self.keeps_pool))
                push_links(self, context)
            except Exception:  # an earlier try, with another spec, may have started jobs
                asyncio.run(runner.stop_all_tries(owner(context["ti"]), backend_for(edl_connection.place)))
                raise
        self._started = False
        self._shown = ShownState(context.get("task_state_store"))
        self._shown.job(spec.name)
        done = self._run(spec, lambda: self._begin(spec, edl_connection))
        return self._finish(spec, done) if isinstance(done, TaskOutcome) else self._defer_to_trigger(done, context)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Finish after the triggerer; this is a new instance, on which `execute` has not run."""
        self._shown = ShownState(context.get("task_state_store"))
        return self._finish(msgspec.convert(event["spec"], TaskSpec), msgspec.convert(event, TaskOutcome))

    def on_kill(self) -> None:
        """Stop this try's work, in a signal handler: cancel the event loop that runs it, if there is one.

        Calls no Airflow service, because the interrupted code may be in the middle of such a call.
        """
        self._killed = True
        if self._cancel:
            self._cancel()
        elif self._spec:
            thread = threading.Thread(target=asyncio.run, args=[self._stop(self._spec)])
            thread.start()
            thread.join()

    def folder(self, place: BackendRef) -> Path | None:
        """Return the folder of the DAG's file, for relative paths in specs; None for pods, which do not have it."""
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
            return await runner.run(started, client, self.log.info, self._shown.progress)

    def _defer_to_trigger(self, spec: TaskSpec, context: Context) -> NoReturn:
        """Defer, unless the task was ended meanwhile: Airflow would refuse, and nothing would stop the work."""
        from edl_airflow.triggers.task import EdlTaskTrigger

        still_running = False
        try:
            still_running = _states(context["ti"]) <= {"running"} and not self._killed
        finally:
            if not still_running:
                self._run(spec, lambda: self._stop(spec))
        if not still_running:
            raise TaskKilledError
        self._spec = None  # from here on the trigger stops it
        self.defer(trigger=EdlTaskTrigger(spec=msgspec.to_builtins(spec)), method_name="execute_complete")

    def _finish(self, spec: TaskSpec, outcome: TaskOutcome) -> Any:
        if outcome.progress:
            self._shown.progress(outcome.progress)
        failure = error_for(outcome, spec.wait_timeout_s)
        if unneeded := spec.jobs if failure else unneeded_jobs(spec, outcome.ended):
            self._run(spec, lambda: self._stop(spec, unneeded))
        self._spec = None if failure or self.keeps_pool else spec
        if failure:
            raise failure
        if self._spec:
            self.on_success_callback = [*self.on_success_callback, partial(self._remove, spec)]
        for warning in result_warnings(spec, outcome):
            self.log.warning(warning)
        return self.result(spec, outcome)

    def _run(self, spec: TaskSpec, do: Callable[[], Awaitable[Result]]) -> Result:
        """Run `do`. If it fails or the task is killed, stop everything of this try.

        Except if the worker is lost, so that Airflow can't be reached: the next try adopts the work then.
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
            if not (isinstance(error, OSError) and await _has_ended(worker, error)):
                await self._stop(spec)
            raise
        finally:
            self._cancel = None

    def _remove(self, spec: TaskSpec, context: Context) -> None:
        """Remove the training that has succeeded, once Airflow has recorded that its task has.

        If the worker is lost before, the next try takes the result, instead of training again.
        """
        if _states(context["ti"]) == {"success"}:
            asyncio.run(self._stop(spec))

    async def _stop(self, spec: TaskSpec, jobs: Collection[str] | None = None) -> None:
        """Stop this try's work, or these jobs of it, and that of earlier tries if this one has not adopted it yet."""
        backend = await asyncio.to_thread(backend_for, spec.place)
        if self._started:
            await runner.stop(spec, backend, jobs)
        else:
            await runner.stop_all_tries(token_owner(spec.token), backend)


async def _has_ended(worker: int, error: OSError) -> bool:
    """Whether this task's worker has ended, by an error of writing to it, perhaps.

    The system closes a process's sockets some time before its children have another parent: long on a busy machine.
    """
    looks = LOOKS_FOR_END if isinstance(error, BrokenPipeError | ConnectionResetError) else 0
    for _ in range(looks):
        if os.getppid() != worker:
            break
        await asyncio.sleep(LOOK_AGAIN_S)
    return os.getppid() != worker


def _states(ti: Any) -> set[str]:
    """Return the task's state as Airflow has recorded it; nothing if it knows none."""
    states = ti.get_task_states(dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index)
    return set(states.get(ti.run_id, {}).values())
