"""A run of a DAG that a test interrupts, and what it may not leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil
from support.airflow.processes import is_alive

from edl_airflow.laptop.client import AirflowClient, Task
from edl_airflow.laptop.launcher import Laptop
from edl_runtime.backends.local import LocalBackend
from edl_runtime.registry.directory import Directory
from edl_runtime.store.client import connect

WITHIN_S = 90.0
"""How long anything may take: all cases share two cores."""

STEADY_S = 3.0
"""What a try that has ended still has to stop, it stops within that."""

OPTIONS = {
    "CORE__PARALLELISM": "8",  # tasks that wait for each other's tests
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",  # when a lost worker is noticed, 300 otherwise
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "2",
    "TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "10",  # when a lost triggerer is noticed, 30 otherwise
}
"""Of an Airflow that notices soon what it has lost."""


class Place(Protocol):
    """Where students run."""

    def lives(self, student: str) -> bool:
        """Whether the student still runs."""
        ...

    def left(self, marks: tuple[str, ...]) -> list[str]:
        """Return all that there is of jobs and pools whose names begin so."""
        ...


class Case:
    """One run. Each of its students leaves its id in a folder, where it finds `go` when it may end."""

    def __init__(
        self,
        laptop: Laptop,
        client: AirflowClient,
        place: Place,
        dag_id: str,
        conf: Mapping[str, Any] | None = None,
        *,
        marks: tuple[str, ...] = (),
    ) -> None:
        self.client = client
        self.marks = marks or (dag_id.replace("_", "-"),)  # how the names of all its jobs and pools begin
        self._laptop = laptop
        self._place = place
        self._folder = laptop.home / "interrupted" / dag_id
        self._folder.mkdir(parents=True)
        self._folder.chmod(0o777)  # a student in a pod is another user
        laptop.wait_for_dag(client, dag_id)
        client.unpause(dag_id)
        self.run = client.trigger(dag_id, conf)

    def student(self) -> str:
        """Wait until a student asks teachers; return its id."""
        self._until_while_it_runs(self.students, "no student has started")
        return self.students()[-1]

    def steady_student(self) -> str:
        """Wait until one student has been the only one for some seconds; return its id."""
        seen: tuple[list[str], float] = ([], 0)

        def is_steady() -> bool:
            nonlocal seen
            alive = [student for student in self.students() if self._place.lives(student)]
            if alive != seen[0]:
                seen = (alive, time.monotonic())
            return len(alive) == 1 and time.monotonic() > seen[1] + STEADY_S

        self._until_while_it_runs(is_steady, "there never was one student")
        return seen[0][0]

    def trains_to_the_end(self) -> str:
        """Let the student end once it is clear that nothing of an earlier try ends it; return its id."""
        student = self.steady_student()
        self.go()
        self.ends("success")
        assert self.client.xcom(self.run, "distill")["metrics"]["student"] == student
        assert self.students()[-1] == student
        self.leaves_nothing()
        return student

    def students(self) -> list[str]:
        """Return the ids of all students that ever asked teachers, in order."""
        file = self._folder / "started"
        return file.read_text().split() if file.exists() else []

    def go(self) -> None:
        """Let the student end."""
        (self._folder / "go").touch()

    def has_saved(self) -> bool:
        """Whether the student was given the time to save what it had."""
        return (self._folder / "saved").exists()

    def task(self, task_id: str = "distill") -> Task:
        return next(task for task in self.client.tasks(self.run) if task.task_id == task_id)

    def log(self, task_id: str = "distill") -> str:
        return "\n".join(self.client.log(self.run, self.task(task_id)))

    def reaches(self, state: str, *, try_number: int = 1) -> None:
        """Wait until the task `distill` is in this state, in this try."""
        wanted = Task("distill", state, try_number)
        self.until(lambda: self.task() == wanted, lambda: f"{self.task()} is not yet {wanted}:\n{self.log()}")

    def ends(self, state: str) -> None:
        """Wait until the run has ended in this state."""
        self.until(lambda: self.client.state(self.run) in ("success", "failed"), "the run goes on")
        assert self.client.state(self.run) == state, self.client.tasks(self.run)

    def mark(self, state: str) -> None:
        """Mark the task `distill` as a person does."""
        path = f"/api/v2/dags/{self.run.dag_id}/dagRuns/{self.run.run_id}/taskInstances/distill"
        self.client._ask("PATCH", path, json={"new_state": state})

    def clear(self) -> None:
        """Clear the task `distill` as a person does."""
        body = {"dry_run": False, "only_failed": False, "dag_run_id": self.run.run_id, "task_ids": ["distill"]}
        self.client._ask("POST", f"/api/v2/dags/{self.run.dag_id}/clearTaskInstances", json=body)

    def task_process(self) -> psutil.Process:
        """Return the process that runs `distill`; its parent is the worker."""
        path = f"/api/v2/dags/{self.run.dag_id}/dagRuns/{self.run.run_id}/taskInstances/distill"
        return psutil.Process(self.client._ask("GET", path)["pid"])

    def leaves_nothing(self) -> None:
        """Wait until no job, pool, registration or student is left."""
        self.until(lambda: not self._place.left(self.marks), lambda: f"there are {self._place.left(self.marks)}")

    def until(self, condition: Callable[[], Any], otherwise: str | Callable[[], str]) -> Any:
        """Wait for something to be true, and return it."""
        deadline = time.monotonic() + WITHIN_S
        while not (found := condition()):
            self._laptop.check()
            assert time.monotonic() < deadline, otherwise if isinstance(otherwise, str) else otherwise()
            time.sleep(0.2)
        return found

    def _until_while_it_runs(self, condition: Callable[[], Any], otherwise: str) -> None:
        def holds() -> Any:
            assert self.client.state(self.run) not in ("success", "failed"), self.log()
            return condition()

        self.until(holds, otherwise)


class ThisMachine:
    """Where students are processes."""

    def __init__(self, laptop: Laptop) -> None:
        self._laptop = laptop

    def lives(self, student: str) -> bool:
        return is_alive(int(student))

    def left(self, marks: tuple[str, ...]) -> list[str]:
        async def names() -> list[str]:
            jobs = [job.name for job in await LocalBackend(self._laptop.work_dir).list()]
            return [*await registered(self._laptop.redis.url), *jobs]

        ours = [name for name in asyncio.run(names()) if name.startswith(marks)]
        return [*ours, *filter(None, (_command(process, marks) for process in psutil.process_iter()))]


async def registered(redis_url: str) -> list[str]:
    """Return the pools that somebody is registered in."""
    async with connect(redis_url) as redis:
        return await Directory(redis, "default").pools()


def _command(process: psutil.Process, marks: tuple[str, ...]) -> str:
    """Return the command of a process that belongs to a job with such a name, empty for any other."""
    try:
        words = process.cmdline()
        names = [process.environ().get("EDL_JOB", ""), *(Path(word).name for word in words)]
    except psutil.Error:
        return ""
    return " ".join(words) if any(name.startswith(marks) for name in names) and process.is_running() else ""
