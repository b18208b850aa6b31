"""A run of a DAG of dags/interrupted.py, as a test interrupts and checks it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil
from laptop.client import AirflowClient, DagRun, TaskInstance
from laptop.launcher import Laptop
from support.airflow.job_hosts import JobHost
from support.airflow.processes import expire_heartbeats

STEADY_S = 3.0
"""An ended try stops within this time what it still has to stop."""

OVER = ("success", "failed")


class WaitUntil(Protocol):
    """Wait until a condition is true; return its value."""

    def __call__(self, condition: Callable[[], Any], otherwise: Callable[[], str] = ...) -> Any: ...


class Case:
    """One run. Each of its students writes its id to `folder`/started and ends once `folder`/go exists."""

    def __init__(
        self, folder: Path, run: DagRun, *, laptop: Laptop, client: AirflowClient, host: JobHost, wait_until: WaitUntil
    ) -> None:
        self.run = run
        self._laptop = laptop
        self.client = client
        self.wait_until = wait_until
        self._folder = folder
        self._host = host
        self._prefixes = (run.dag_id.replace("_", "-"),)  # of the names of all its jobs and pools

    @property
    def _path(self) -> str:
        """The path of the task `distill` in Airflow's API."""
        return f"/api/v2/dags/{self.run.dag_id}/dagRuns/{self.run.run_id}/taskInstances/distill"

    def wait_for_student(self) -> str:
        """Wait until a student has started; return its id."""
        self._wait_while_running(self.students, "no student has started")
        return self.students()[-1]

    def wait_for_steady_student(self) -> str:
        """Wait until there has been only one student, of the latest try, for some seconds; return its id.

        Until the latest try has adopted it an earlier try may still end it.
        """
        last_seen: tuple[list[str], float] = ([], 0)

        def is_steady() -> bool:
            nonlocal last_seen
            alive = [student for student in self.students() if self._host.is_running(student)]
            if alive != last_seen[0] or not self._is_of_latest_try():
                last_seen = (alive, time.monotonic())
            return len(alive) == 1 and time.monotonic() > last_seen[1] + STEADY_S

        self._wait_while_running(is_steady, "there was never only one student")
        return last_seen[0][0]

    def _is_of_latest_try(self) -> bool:
        """Whether the job and its pool have the token of the task's current try."""
        this_try = str(self.client._ask("GET", self._path)["id"])
        return {token.rpartition(".")[2] for token in self._host.tokens(self._prefixes)} == {this_try}

    def train_to_the_end(self) -> str:
        """Let the student end once no earlier try can end it; check that the run succeeds; return its id."""
        student = self.wait_for_steady_student()
        self.finish()
        self.wait_for_end("success")
        assert self.client.xcom(self.run, "distill")["metrics"]["student"] == student
        assert self.students()[-1] == student
        self.wait_until_nothing_remains()
        return student

    def check_taken_over(self, student: str) -> None:
        """Check that this student trains to the end, and that there was no other job."""
        assert self.train_to_the_end() == student
        assert self.jobs() == 1

    def students(self) -> list[str]:
        """Return the ids of all students that have ever started, in order."""
        file = self._folder / "started"
        return file.read_text().split() if file.exists() else []

    def jobs(self) -> int:
        """Return how many students there have ever been, each with one pool of one teacher."""
        created = self._host.created_pods(self._prefixes)
        students = created.get("Job", len(self.students()))
        assert created.get("ReplicaSet", students) == students
        return students

    def finish(self) -> None:
        """Let the student end."""
        (self._folder / "go").touch()

    def has_saved(self) -> bool:
        """Whether the student had the time to save its state."""
        return (self._folder / "saved").exists()

    def wait_for_the_end_of_work(self) -> None:
        """Wait until the work has ended, and the process of its task is about to say so."""
        self._wait_while_running((self._folder / "ending").exists, "the work has not ended")

    def task(self, task_id: str = "distill") -> TaskInstance:
        return next(task for task in self.client.tasks(self.run) if task.task_id == task_id)

    def log(self, task_id: str = "distill") -> str:
        return "\n".join(self.client.log(self.run, self.task(task_id)))

    def wait_for_state(self, state: str, *, try_number: int = 1) -> None:
        """Wait until the task `distill` is in this state, in this try."""
        wanted = TaskInstance("distill", state, try_number)
        self.wait_until(lambda: self.task() == wanted, lambda: f"{self.task()} is not yet {wanted}:\n{self.log()}")

    def wait_for_end(self, state: str) -> None:
        """Wait until the run has ended in this state."""
        self.wait_until(lambda: self.client.state(self.run) in OVER, lambda: "the run has not ended")
        assert self.client.state(self.run) == state, self.client.tasks(self.run)

    def mark(self, state: str) -> None:
        """Mark the task `distill`, as a user does."""
        self.client._ask("PATCH", self._path, json={"new_state": state})

    def clear(self) -> None:
        """Clear the task `distill`, as a user does."""
        body = {"dry_run": False, "only_failed": False, "dag_run_id": self.run.run_id, "task_ids": ["distill"]}
        self.client._ask("POST", f"/api/v2/dags/{self.run.dag_id}/clearTaskInstances", json=body)

    def task_process(self) -> psutil.Process:
        """Return the process that runs `distill`; its parent is the worker."""
        return psutil.Process(self.client._ask("GET", self._path)["pid"])

    def trigger_id(self) -> int:
        """Return the id of the trigger of `distill`, which is deferred."""
        return int(self.client._ask("GET", self._path)["trigger"]["id"])

    def expire_worker_heartbeat(self) -> None:
        """Expire the heartbeat of the task, whose worker a test has killed, until Airflow has ended the try.

        Repeatedly, as the last heartbeat may be written after the first time.
        """
        lost = self.task()
        condition = "WHERE dag_id = ? AND run_id = ? AND task_id = 'distill' AND try_number = ? AND state = 'running'"
        statement = f"UPDATE task_instance SET last_heartbeat_at = ? {condition}"

        def has_ended() -> bool:
            expire_heartbeats(self._laptop, statement, self.run.dag_id, self.run.run_id, str(lost.try_number))
            return self.task() != lost

        self.wait_until(has_ended, lambda: f"{lost} has not been ended")

    def wait_until_nothing_remains(self) -> None:
        """Wait until there is no job, pool, registration or student."""
        self.wait_until(
            lambda: not self._host.remaining(self._prefixes),
            lambda: f"remaining: {self._host.remaining(self._prefixes)}",
        )

    def _wait_while_running(self, condition: Callable[[], Any], otherwise: str) -> None:
        def holds() -> Any:
            assert self.client.state(self.run) not in OVER, self.log()
            return condition()

        self.wait_until(holds, lambda: otherwise)
