"""A run of a DAG that a test interrupts, and what it may not leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
from system.processes import is_alive

from edl_airflow.laptop.client import AirflowClient, Task
from edl_airflow.laptop.launcher import Laptop
from edl_runtime.backends.local import LocalBackend
from edl_runtime.registry.directory import Directory
from edl_runtime.store.client import connect

WITHIN_S = 90.0
"""How long anything may take: all cases share two cores."""

STEADY_S = 3.0
"""What a try that has ended still has to stop, it stops within that."""


class Case:
    """One run. Its student leaves its process ids in a folder, where it finds `go` when it may end."""

    def __init__(
        self,
        laptop: Laptop,
        client: AirflowClient,
        dag_id: str,
        conf: Mapping[str, Any] | None = None,
        *,
        marks: tuple[str, ...] = (),
    ) -> None:
        self.client = client
        self._laptop = laptop
        self._marks = marks or (dag_id.replace("_", "-"),)  # how the names of all its jobs and pools begin
        self._folder = laptop.home / "interrupted" / dag_id
        self._folder.mkdir(parents=True)
        laptop.wait_for_dag(client, dag_id)
        client.unpause(dag_id)
        self.run = client.trigger(dag_id, conf)

    def student(self) -> int:
        """Wait until a student asks teachers; return its process id."""
        self._until_while_it_runs(self.students, "no student has started")
        return self.students()[-1]

    def steady_student(self) -> int:
        """Wait until one student has been the only one for some seconds; return its process id."""
        seen: tuple[list[int], float] = ([], 0)

        def is_steady() -> bool:
            nonlocal seen
            alive = [pid for pid in self.students() if is_alive(pid)]
            if alive != seen[0]:
                seen = (alive, time.monotonic())
            return len(alive) == 1 and time.monotonic() > seen[1] + STEADY_S

        self._until_while_it_runs(is_steady, "there never was one student")
        return seen[0][0]

    def students(self) -> list[int]:
        """Return the process ids of all students that ever asked teachers, in order."""
        file = self._folder / "started"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

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
        """Wait until no job, pool, registration or process is left."""
        self.until(lambda: not self._left(), lambda: f"there are {self._left()}")

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

    def _left(self) -> list[str]:
        async def names() -> list[str]:
            async with connect(self._laptop.redis.url) as redis:
                pools = await Directory(redis, "default").pools()
            return [*pools, *(job.name for job in await LocalBackend(self._laptop.work_dir).list())]

        return [*filter(self._is_ours, asyncio.run(names())), *filter(None, map(self._ours, psutil.process_iter()))]

    def _ours(self, process: psutil.Process) -> str:
        try:
            words = process.cmdline()
            ours = self._is_ours(process.environ().get("EDL_JOB", ""))
            ours = ours or any(self._is_ours(Path(word).name) for word in words)
        except psutil.Error:
            return ""
        return " ".join(words) if ours and process.is_running() else ""

    def _is_ours(self, name: str) -> bool:
        return name.startswith(self._marks)
