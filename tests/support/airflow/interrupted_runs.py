"""A run of a DAG that a test interrupts, and what it may not leave."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil
from laptop.client import AirflowClient, DagRun, TaskInstance
from laptop.launcher import Laptop
from support.airflow.places import Place
from support.airflow.processes import miss

STEADY_S = 3.0
"""What a try that has ended still has to stop, it stops within that."""

OVER = ("success", "failed")


class Until(Protocol):
    """Waits for something to be true, and returns it."""

    def __call__(self, condition: Callable[[], Any], otherwise: Callable[[], str] = ...) -> Any: ...


class Case:
    """One run. Each of its students leaves its id in `folder`, where it finds `go` when it may end."""

    def __init__(
        self, folder: Path, run: DagRun, *, laptop: Laptop, client: AirflowClient, place: Place, until: Until
    ) -> None:
        self.run = run
        self._laptop = laptop
        self.client = client
        self.until = until
        self._folder = folder
        self._place = place
        self._marks = (run.dag_id.replace("_", "-"),)  # how the names of all its jobs and pools begin

    @property
    def _path(self) -> str:
        """Where Airflow's API has the task `distill`."""
        return f"/api/v2/dags/{self.run.dag_id}/dagRuns/{self.run.run_id}/taskInstances/distill"

    def student(self) -> str:
        """Wait until a student asks teachers; return its id."""
        self._until_while_it_runs(self.students, "no student has started")
        return self.students()[-1]

    def steady_student(self) -> str:
        """Wait until one student has been the only one, and the last try's, for some seconds; return its id.

        Before that try has taken it over an earlier one may still end it, however late that hears of its own end.
        """
        seen: tuple[list[str], float] = ([], 0)

        def is_steady() -> bool:
            nonlocal seen
            alive = [student for student in self.students() if self._place.lives(student)]
            if alive != seen[0] or not self._is_the_last_trys():
                seen = (alive, time.monotonic())
            return len(alive) == 1 and time.monotonic() > seen[1] + STEADY_S

        self._until_while_it_runs(is_steady, "there never was one student")
        return seen[0][0]

    def _is_the_last_trys(self) -> bool:
        """Whether the job and its pool carry the token of the try that the task is in now."""
        this_try = str(self.client._ask("GET", self._path)["id"])
        return {token.rpartition("/")[2] for token in self._place.tokens(self._marks)} == {this_try}

    def trains_to_the_end(self) -> str:
        """Let the student end once it is clear that nothing of an earlier try ends it; return its id."""
        student = self.steady_student()
        self.go()
        self.ends("success")
        assert self.client.xcom(self.run, "distill")["metrics"]["student"] == student
        assert self.students()[-1] == student
        self.leaves_nothing()
        return student

    def is_taken_over(self, student: str) -> None:
        """Check that this student, and no other job, trains to the end."""
        assert self.trains_to_the_end() == student
        assert self.jobs() == 1

    def students(self) -> list[str]:
        """Return the ids of all students that ever asked teachers, in order."""
        file = self._folder / "started"
        return file.read_text().split() if file.exists() else []

    def jobs(self) -> int:
        """Return how many students there have ever been, each of which had one pool of one teacher."""
        created = self._place.created(self._marks)
        students = created.get("Job", len(self.students()))
        assert created.get("ReplicaSet", students) == students
        return students

    def go(self) -> None:
        """Let the student end."""
        (self._folder / "go").touch()

    def has_saved(self) -> bool:
        """Whether the student was given the time to save what it had."""
        return (self._folder / "saved").exists()

    def task(self, task_id: str = "distill") -> TaskInstance:
        return next(task for task in self.client.tasks(self.run) if task.task_id == task_id)

    def log(self, task_id: str = "distill") -> str:
        return "\n".join(self.client.log(self.run, self.task(task_id)))

    def reaches(self, state: str, *, try_number: int = 1) -> None:
        """Wait until the task `distill` is in this state, in this try."""
        wanted = TaskInstance("distill", state, try_number)
        self.until(lambda: self.task() == wanted, lambda: f"{self.task()} is not yet {wanted}:\n{self.log()}")

    def ends(self, state: str) -> None:
        """Wait until the run has ended in this state."""
        self.until(lambda: self.client.state(self.run) in OVER, lambda: "the run goes on")
        assert self.client.state(self.run) == state, self.client.tasks(self.run)

    def mark(self, state: str) -> None:
        """Mark the task `distill` as a person does."""
        self.client._ask("PATCH", self._path, json={"new_state": state})

    def clear(self) -> None:
        """Clear the task `distill` as a person does."""
        body = {"dry_run": False, "only_failed": False, "dag_run_id": self.run.run_id, "task_ids": ["distill"]}
        self.client._ask("POST", f"/api/v2/dags/{self.run.dag_id}/clearTaskInstances", json=body)

    def task_process(self) -> psutil.Process:
        """Return the process that runs `distill`; its parent is the worker."""
        return psutil.Process(self.client._ask("GET", self._path)["pid"])

    def misses_its_worker(self) -> None:
        """Let Airflow miss the heartbeats of the task's worker, which a test has killed.

        Its last one may be written after it was set back, so it is set back until Airflow has ended the try.
        """
        lost = self.task()
        where = "WHERE dag_id = ? AND run_id = ? AND task_id = 'distill' AND try_number = ? AND state = 'running'"
        statement = f"UPDATE task_instance SET last_heartbeat_at = ? {where}"

        def is_missed() -> bool:
            miss(self._laptop, statement, self.run.dag_id, self.run.run_id, str(lost.try_number))
            return self.task() != lost

        self.until(is_missed, lambda: f"nobody misses {lost}")

    def leaves_nothing(self) -> None:
        """Wait until no job, pool, registration or student is left."""
        self.until(lambda: not self._place.left(self._marks), lambda: f"there are {self._place.left(self._marks)}")

    def _until_while_it_runs(self, condition: Callable[[], Any], otherwise: str) -> None:
        def holds() -> Any:
            assert self.client.state(self.run) not in OVER, self.log()
            return condition()

        self.until(holds, lambda: otherwise)
