"""Follows a run of a DAG to its end."""

from __future__ import annotations

import time
from collections.abc import Callable

from laptop.client import AirflowClient, DagRun, TaskInstance

from edl_runtime.backends.errors import JobFailedError

LOOK_EVERY_S = 1.0
LAST_LINES = 15

Say = Callable[[str], None]


def follow_run(
    client: AirflowClient, run: DagRun, say: Say, *, check: Callable[[], None], timeout_s: float = 1800
) -> None:
    """Return when the run has succeeded; report changes of tasks' states and progress to `say`.

    `check` is called every second and raises to give up. Raises JobFailedError, with the last lines of the failed task,
    and TimeoutError.
    """
    reporter = _RunReporter(client, run, say)
    deadline = time.monotonic() + timeout_s
    while True:
        check()
        state = client.state(run)
        tasks = client.tasks(run)
        reporter.report(tasks)
        if state == "success":
            return
        if state == "failed":
            raise _failure(client, run, tasks)
        if time.monotonic() > deadline:
            raise TimeoutError(f"run {run.run_id!r} of {run.dag_id!r} is still {state} after {timeout_s:.0f} s")
        time.sleep(LOOK_EVERY_S)


class _RunReporter:
    """Reports only what has changed."""

    def __init__(self, client: AirflowClient, run: DagRun, say: Say) -> None:
        self._client = client
        self._run = run
        self._say = say
        self._states: dict[str, str] = {}
        self._lines: dict[tuple[str, int], int] = {}

    def report(self, tasks: list[TaskInstance]) -> None:
        for task in tasks:
            before = self._states.get(task.task_id, "none")
            if before == "deferred" or task.state == "deferred":
                self._log_progress(task)
            if task.state != before:
                self._states[task.task_id] = task.state
                self._say(f"{task.task_id}: {task.state}")

    def _log_progress(self, task: TaskInstance) -> None:
        lines = self._client.log(self._run, task)
        reported = self._lines.get((task.task_id, task.try_number), 0)
        self._lines[task.task_id, task.try_number] = len(lines)
        for line in lines[reported:]:
            if line.startswith("step "):
                self._say(f"{task.task_id}: {line}")


def _failure(client: AirflowClient, run: DagRun, tasks: list[TaskInstance]) -> JobFailedError:
    failed = next((task for task in tasks if task.state == "failed"), None)
    if failed is None:
        return JobFailedError(run.run_id, "none of its tasks has failed")
    lines = [line for line in client.log(run, failed) if line.strip()]
    return JobFailedError(f"{run.dag_id}.{failed.task_id}", f"in run {run.run_id}", lines[-LAST_LINES:])
