"""Resizes a pool or a job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import msgspec
from airflow.sdk import BaseOperatorLink, conf
from airflow.sdk.exceptions import AirflowSkipException

from edl_airflow.client import EdlClient, job_status, open_client
from edl_airflow.failures import TargetEndedError, error_for, failing_without_retry
from edl_airflow.hooks.edl import DEFAULT_CONN_ID, EdlConnection, EdlHook
from edl_airflow.links import ResizedLink, push_links
from edl_airflow.operators.templates import (
    Arguments,
    Maybe,
    TemplatedOperator,
    as_count,
    as_seconds,
    check_connection,
    check_deferrable,
    dag_folder,
    has_template,
    task_deadline,
)
from edl_airflow.results import PoolResult, RunningJob
from edl_airflow.runtime.decisions import FINISHED_REASON
from edl_airflow.runtime.spec import TaskOutcome
from edl_airflow.sensors.job import JobCondition
from edl_airflow.sensors.teacher_pool import PoolCondition
from edl_airflow.traffic_windows import (
    Windows,
    WindowTarget,
    capacity_in_window,
    check_window,
    is_known_at_parse,
    load_windows,
    own_size,
    target_in_window,
    window_for_run,
    windows_field,
)
from edl_airflow.waits import evaluate, wait_for
from edl_runtime.autoscale.traffic.windows import Sizes
from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.errors import BackendError, SpecError
from edl_runtime.specs import check_name

if TYPE_CHECKING:
    from airflow.sdk import Context


class EdlResizeOperator(TemplatedOperator):
    """Change the number of a running pool's teachers, or of a running job's instances, within its bounds.

    Students use new teachers, and jobs add new trainers, without a restart. Returns a `PoolResult` or a `RunningJob`
    when the new size is reached: the teachers are registered, the instances train together. A task that fails or is
    killed later does not undo the resize. If the pool or job has ended, or ends meanwhile, the task is skipped; an
    unknown name is an error, and so is waiting for a job that is not elastic.

    With `windows`, the size comes from the run's traffic window, if a `TrafficWindowTimetable` gave it one, else from
    the current window: its number or share for this job or pool, or as many as fit into what training may use. Below
    its minimum a job or pool is suspended, unless it could not resume: then it keeps its minimum. Log and result have
    the reason.

    Declared windows count, not a learned source of traffic. Where `EdlAutoscaleOperator` rescales all jobs of the
    connection, its next pass decides again.

    :param teacher_pool: the pool's name; give this or `job` (templated)
    :param job: the name of a job of elastic trainers, as given to `EdlTrainOperator` (templated)
    :param instances: the number of teachers or instances; give this or `windows` (templated)
    :param windows: traffic windows, as a mapping, a Path of a YAML file (a relative one starts from the DAG's file), a
        text, or "variable:NAME" for an Airflow Variable, which is read when the task runs (templated)
    :param window: the name of the window to use, instead of the current one; "default" for the times between windows
        (templated)
    :param wait: wait until exactly so many are there
    :param wait_timeout_s: seconds to wait before the task fails
    :param edl_conn_id: the Airflow connection of type `edl` (templated)
    :param deferrable: wait in the triggerer, without a worker slot
    """

    template_fields: Sequence[str] = ("teacher_pool", "job", "instances", "windows", "window", "edl_conn_id")
    operator_extra_links: Sequence[BaseOperatorLink] = (ResizedLink(),)
    ui_color = "#fff2cc"
    arguments: ClassVar[Arguments] = {
        "teacher_pool": Maybe(check_name),
        "job": Maybe(check_name),
        "instances": Maybe(as_count),
        "wait_timeout_s": as_seconds,
    }

    def __init__(
        self,
        *,
        teacher_pool: str | None = None,
        job: str | None = None,
        instances: int | str | None = None,
        windows: Windows | None = None,
        window: str | None = None,
        wait: bool = True,
        wait_timeout_s: float = 120,
        edl_conn_id: str = DEFAULT_CONN_ID,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.teacher_pool = teacher_pool
        self.job = job
        self.instances = instances
        self.windows = None if windows is None else windows_field(windows, dag_folder(self))
        self.window = window
        self.wait = wait
        self.wait_timeout_s = wait_timeout_s
        self.edl_conn_id = check_connection(edl_conn_id)
        self.deferrable = check_deferrable(deferrable)
        self._check_given()
        if window is not None and windows is None:
            raise SpecError("window", window, "the name of one of `windows`, which have to be given too")
        if window is not None and not has_template(window) and is_known_at_parse(self.windows):
            check_window(load_windows(self.windows), window)
        self.check_arguments()

    def execute(self, context: Context) -> PoolResult | RunningJob:
        """Resize it; then wait for its instances, or defer."""
        with failing_without_retry():
            self._check_given()  # the output of an upstream task may be None
            edl_connection = EdlHook(self.edl_conn_id).edl_connection()
            window = None if self.windows is None else self._window_now(context)
            name = self.argument("job") or self.argument("teacher_pool")
            push_links(self, context)
            ended = asyncio.run(self._resize(name, window, edl_connection))
        return self._result(ended) if isinstance(ended, TaskOutcome) else self._defer(ended)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> PoolResult | RunningJob:  # noqa: ARG002
        """Finish after the triggerer; this is a new instance, on which `execute` has not run."""
        return self._result(msgspec.convert(event, TaskOutcome))

    def _check_given(self) -> None:
        pool, job, instances, windows = self.teacher_pool, self.job, self.instances, self.windows
        if (pool is None) == (job is None):
            raise SpecError("teacher_pool, job", (pool, job), "the name of a pool or that of a job, one of them")
        if (instances is None) == (windows is None):
            raise SpecError("instances, windows", (instances, windows), "a number or traffic windows, one of them")

    def _window_now(self, context: Context) -> tuple[str, Sizes]:
        """Return the name and sizes of the window to use. Raises SpecError."""
        windows = load_windows(self.windows, folder=dag_folder(self))
        if self.window is not None:
            return self.window, check_window(windows, self.window)
        span = window_for_run(windows, context)
        return span.name, span.sizes

    def _new_condition(self, name: str, wanted: WindowTarget) -> PoolCondition | JobCondition:
        common: dict[str, Any] = {
            "conn_id": self.edl_conn_id,
            "at_least": wanted.instances,
            "at_most": wanted.instances,
            "wait_timeout_s": self.wait_timeout_s,
            "until": time.time() + self.wait_timeout_s,
            "deadline": task_deadline(self),
            "began_at": time.time(),
            "because": wanted.reason,
            "seen": True,
        }
        return PoolCondition(teacher_pool=name, **common) if self.job is None else JobCondition(job=name, **common)

    async def _resize(
        self, name: str, window: tuple[str, Sizes] | None, edl_connection: EdlConnection
    ) -> TaskOutcome | PoolCondition | JobCondition:
        """Resize it; return the outcome, or the condition to wait for."""
        async with open_client(edl_connection) as client:
            try:
                wanted = WindowTarget(self.argument("instances"), reason="")
                if window:
                    wanted = await _wanted(name, *window, client)
                await client.backend.resize(name, wanted.instances)
            except BackendError as error:
                if reason := await _why_ended(name, error, client):
                    return TaskOutcome(ended="gone", name=name, reason=reason)
                raise
            because = f": {wanted.reason}" if wanted.reason else ""
            self.log.info("Requested %d instances of %r%s", wanted.instances, name, because)
            condition = self._new_condition(name, wanted)
            if self.wait and not self.deferrable:
                return await wait_for(condition, client, self.log.info)
            view: Any = await condition.observe(client, time.time())
            return (evaluate(condition, view, time.time()) or condition) if self.wait else condition.ready(view)

    def _defer(self, condition: PoolCondition | JobCondition) -> NoReturn:
        from edl_airflow.triggers.task import EdlConditionTrigger

        self.defer(trigger=EdlConditionTrigger.of(condition), method_name="execute_complete")

    def _result(self, outcome: TaskOutcome) -> PoolResult | RunningJob:
        failure = error_for(outcome, self.wait_timeout_s)
        if isinstance(failure, TargetEndedError):
            raise AirflowSkipException(f"{failure}; there is nothing to resize") from failure
        if failure:
            raise failure
        return outcome.pool_result() if self.job is None else outcome.running_job()


async def _wanted(name: str, window: str, sizes: Sizes, client: EdlClient) -> WindowTarget:
    """Return the window's size for a job or pool. Raises BackendError."""
    status = await client.backend.get(name)
    if status.scaling is None:
        raise BackendError(f"{name!r} has ended")
    size = own_size(sizes, status)
    room = {}
    if size is None or size.share:
        there = await client.backend.capacity()
        room = capacity_in_window(sizes, there.total, there.quota_total)
    return target_in_window(window, sizes, status, status.scaling, room)


async def _why_ended(name: str, error: BackendError, client: EdlClient) -> str:
    """Return why a pool or job has ended; empty if it runs, or if there never was one."""
    status = await job_status(client.backend, name)
    if status:
        return FINISHED_REASON if status.phase == "succeeded" else ""
    if not isinstance(error, UnknownJobError):
        return ""
    try:
        async for _ in client.backend.logs(name, tail=1):  # a job's log outlives the job
            break
    except UnknownJobError:
        return ""
    return "it was there, and has ended or was stopped"
