"""A Redis, a work folder and a folder of DAG files, and tasks that run there without a scheduler."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import TaskDeferred
from support.airflow.fakes import FakeTaskInstance, deferred_by, succeed
from support.paths import TESTS
from support.students import readers
from support.teachers.process import wait_until

from edl_airflow.operators.distill import EdlDistillOperator
from edl_airflow.runtime.spec import TaskOutcome
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import TeacherSpec, TrainerSpec

STUDENT = """
import os, sys, time
from pathlib import Path
from pkgutil import resolve_name
from edl_runtime.result import write_result

folder, does = Path(sys.argv[1]), sys.argv[2]
with open(folder / "started", "a") as started:
    print(os.getpid(), file=started)
print("student: started", flush=True)
while does.startswith("waits") and not (folder / "go").exists():
    time.sleep(0.02)
if does.endswith("fails"):
    sys.exit("ValueError: loss is not a number")
write_result(checkpoint=str(folder / "model"), metrics={"accuracy": 0.5})
"""

REPORTS = """
import asyncio, os, sys, time
from edl_runtime.progress import Progress, publish_progress
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

async def main():
    settings = RuntimeSettings.from_env(os.environ)
    async with connect(settings.redis_url) as client:
        for step in range(1, 4):
            progress = Progress(
                step=step, total_steps=3, updated_at=time.time(), loss=0.25, answered={"a:1": step},
                teachers=1, waiting=0.38, limit="teachers", quarantined={"b:1": "b:1: timed out"},
            )
            await publish_progress(client, settings.namespace, settings.job, progress)

asyncio.run(main())
"""


class World:
    """Connections, scripts, and running jobs."""

    def __init__(self, folder: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.redis_url = redis_url
        self.namespace = namespace
        self.work_dir = folder / "edl"
        self.backend = LocalBackend(self.work_dir)
        self._monkeypatch = monkeypatch
        for module in ("runtime.runner", "waits"):
            monkeypatch.setattr(f"edl_airflow.{module}.POLL_INTERVAL_S", 0.1)
        monkeypatch.setattr("edl_airflow.runtime.log.FINAL_LINES_WAIT_S", 60.0)
        for name, text in (("student", STUDENT), ("reports", REPORTS)):
            (folder / f"{name}.py").write_text(text)
        shutil.copy(TESTS / "system" / "dags" / "answers.py", folder)
        self.connect_to(redis_url)

    def connect_to(self, redis_url: str, conn_id: str = "edl_default", work_dir: Path | None = None) -> None:
        """Set a connection to this Redis, with the world's work folder or another one."""
        url = urlsplit(redis_url)
        given: dict[str, Any] = {"conn_type": "edl", "host": url.hostname, "port": url.port}
        given |= {"login": url.username or None, "password": url.password}
        given["extra"] = {"namespace": self.namespace, "work_dir": str(work_dir or self.work_dir)}
        self._monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(given))

    def dag(self) -> DAG:
        """A DAG of a file in this world's folder."""
        dag = DAG("nightly", schedule=None)
        dag.fileloc = str(self.folder / "nightly.py")
        return dag

    def context(self, try_id: str = "try-1", map_index: int = -1) -> Any:
        """The context of `execute`; `try_id` is the task instance's id, another one in each try."""
        xcoms: dict[str, Any] = {}
        given = {"id": try_id, "dag_id": "nightly", "task_id": "distill", "run_id": "manual__1", "map_index": map_index}
        ti = FakeTaskInstance(**given, state="running", xcoms=xcoms)
        return {"ti": ti, "run_id": ti.run_id, "xcoms": xcoms}

    def student(self, does: str = "ends") -> TrainerSpec:
        """A script that "ends", "fails", "waits" until `go` is called, or "waits-and-fails"."""
        return TrainerSpec(command=("python", str(self.folder / "student.py"), str(self.folder), does))

    def teacher(self, model: str = "answers:double") -> TeacherSpec:
        """A real teacher of a Python function."""
        return TeacherSpec(model=model)

    def go(self) -> None:
        """Let the waiting student end."""
        (self.folder / "go").touch()

    def starts(self) -> list[int]:
        """The process ids of the students started so far."""
        file = self.folder / "started"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def jobs(self) -> dict[str, str]:
        """The phase of each job and pool of the backend."""
        return {status.name: status.phase for status in asyncio.run(self.backend.list())}

    def processes(self, *, supervisors: bool = True) -> list[psutil.Process]:
        """Teachers, students, and supervisors of this world."""
        return [process for process in psutil.process_iter() if self._is_ours(process, supervisors=supervisors)]

    def _is_ours(self, process: psutil.Process, *, supervisors: bool) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == psutil.Process().pid:
                return False
            command = process.cmdline()
            ours = process.environ().get("EDL_NAMESPACE") == self.namespace
            ours = ours or any(str(self.folder) in word for word in command)
        except psutil.Error:
            return False
        return ours and (supervisors or "edl_runtime.backends.local.supervisor" not in command)


def checked_world(world: World) -> Iterator[World]:
    """Yield a world that must have no processes after the test."""
    yield world
    try:
        wait_until(lambda: not world.processes())  # a supervisor ends a moment after its job is gone
    finally:
        for name in world.jobs():
            asyncio.run(world.backend.delete(name))


def distill(world: World, does: str = "ends", **changes: Any) -> EdlDistillOperator:
    """A task that trains with an existing pool, unless changed."""
    given: dict[str, Any] = {"task_id": "distill", "dag": world.dag(), "student": world.student(does)}
    given |= {"teacher_pool": "digits", "deferrable": False, "wait_timeout_s": 200}
    return EdlDistillOperator(**{**given, **changes})


async def follow_until_started(world: World, deferred: TaskDeferred) -> None:
    """Run the trigger until the student has started, then cancel it, as an ending triggerer does."""
    running = asyncio.ensure_future(fired(trigger_of(deferred)))
    await asyncio.to_thread(wait_until, world.starts)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def trigger_of(deferred: TaskDeferred) -> Any:
    """The trigger, deserialized from JSON as in another process."""
    path, kwargs = deferred.trigger.serialize()
    return resolve_name(path)(**json.loads(json.dumps(kwargs)))


async def fired(trigger: Any) -> dict[str, Any]:
    """Run a trigger to its one event."""
    (event,) = [event async for event in trigger.run()]
    payload: dict[str, Any] = json.loads(json.dumps(event.payload))
    msgspec.convert(payload, TaskOutcome)
    return payload


def resume(operator: Any, context: Any, deferred: TaskDeferred, event: dict[str, Any]) -> Any:
    """Run the second half on a fresh operator, and record that the task has succeeded."""
    result = getattr(operator, deferred.method_name)(context, event)
    succeed(operator, context)
    return result


def run_task(operator: Any, context: Any) -> Any:
    """Run a task to its end, through a trigger if it is deferrable, and record that it has succeeded."""
    if operator.deferrable:
        deferred = deferred_by(operator, context)
        return resume(operator, context, deferred, asyncio.run(fired(trigger_of(deferred))))
    result = operator.execute(context)
    succeed(operator, context)
    return result


def registered(world: World, pool: str, address: str) -> AbstractContextManager[None]:
    """Register a teacher for students that never ask one."""
    settings = RuntimeSettings(redis_url=world.redis_url, namespace=world.namespace, lease_ttl_s=60.0)
    return readers.registered(settings, address, pool=pool)
