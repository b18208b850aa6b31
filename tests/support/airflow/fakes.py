"""Fakes of Airflow, a backend and Redis, for unit tests."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncGenerator, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from airflow.sdk.exceptions import TaskDeferred

from edl_airflow.client import EdlClient
from edl_airflow.results import CheckpointResult
from edl_airflow.runtime.spec import LocalBackendRef, LogPosition, TaskOutcome, TaskSpec, TrainingStatus
from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import (
    Capacity,
    InstanceStatus,
    JobStatus,
    LogLine,
    NodeCapacity,
    Origin,
    check_owner,
)
from edl_runtime.errors import EX_CONFIG
from edl_runtime.progress import Progress
from edl_runtime.specs import Bounds, JobSpec
from edl_runtime.store.errors import RegistryUnavailableError

POOL = JobSpec(name="digits", kind="pool", command=("t",), bounds=Bounds(2, 3), instances=2)
STUDENT = JobSpec(name="student", kind="trainer", command=("s",), bounds=Bounds(1, 1), instances=1)


class FakeBackend:
    """Jobs in a dict; the test sets how they end. `ended`: earlier jobs whose logs are kept.

    `gets` and `lists` count requests, `calls` has changes; `written` has the log lines of instances.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, JobStatus] = {}
        self.ended: set[str] = set()
        self.gets = 0
        self.lists = 0
        self.written: list[LogLine] = []
        self.nodes: list[dict[str, float]] = [{"cpu": 8.0, "gpu": 4.0}] * 2
        self.moving: set[str] = set()
        self._gets_left: dict[str, int] = {}
        self.calls: list[tuple[str, str]] = []

    @property
    def place(self) -> str:
        return "fake"

    async def submit(
        self, spec: JobSpec, *, token: str, secrets: Mapping[str, str], origin: Origin | None = None
    ) -> JobStatus:
        assert secrets["EDL_REDIS_URL"]
        check_owner(self.jobs.get(spec.name), token)
        self.calls.append(("submit", spec.name))
        known = self.jobs.get(spec.name)
        phase = known.phase if known and known.digest == spec.digest and known.phase != "failed" else "running"
        self.jobs[spec.name] = job_status(spec.name, token, phase=phase, digest=spec.digest, origin=origin)
        return self.jobs[spec.name]

    def forget_after(self, name: str, *, looks: int) -> None:
        """Remove a job after `looks` reads."""
        self._gets_left[name] = looks

    async def get(self, name: str) -> JobStatus:
        self.gets += 1
        if name in self._gets_left:
            self._gets_left[name] -= 1
            if self._gets_left[name] < 0:
                self.jobs.pop(name, None)
        if name not in self.jobs:
            raise UnknownJobError(name)
        return self.jobs[name]

    async def list(self) -> list[JobStatus]:
        self.lists += 1
        return list(self.jobs.values())

    async def resize(self, name: str, instances: int) -> JobStatus:
        self.calls.append((f"resize to {instances}", name))
        return await self.get(name)

    async def evacuate(self, jobs: Collection[str] | None = None) -> builtins.list[str]:
        return [f"{name} moves" for name in sorted(self.moving.intersection(jobs or self.jobs))]

    async def capacity(self) -> Capacity:
        nodes = (NodeCapacity(name=f"n{number}", total=has, free=has) for number, has in enumerate(self.nodes))
        return Capacity(nodes=tuple(nodes))

    async def logs(
        self, name: str, *, instance: int | None = None, tail: int | None = None, follow: bool = False
    ) -> AsyncGenerator[LogLine, None]:
        if name not in {*self.jobs, *self.ended}:
            raise UnknownJobError(name)
        sent = 0
        while True:
            running = name in self.jobs and self.jobs[name].phase == "running"
            for line in self.written[sent if tail is None else -tail :]:
                sent += 1
                if instance in (None, line.instance):
                    yield line
            if not (follow and running):
                return
            await asyncio.sleep(0.01)

    async def delete(self, name: str, *, token: str | None = None) -> bool:
        if name not in self.jobs or token not in (None, self.jobs[name].token):
            return False
        self.calls.append(("delete", name))
        del self.jobs[name]
        return True


class FakeClient(EdlClient):
    """A fake backend and Redis; `away` makes Redis unavailable, `refused` counts the failed requests."""

    def __init__(self) -> None:
        self.secrets = {"EDL_REDIS_URL": "redis://:secret@nowhere:1/0"}
        self.backend: Any = FakeBackend()
        self.registered: list[str] = []
        self.others = ""
        self.reports: dict[str, Progress] = {}
        self.trainings: dict[str, TrainingStatus] = {}
        self.saved: list[CheckpointResult | None] = []
        self.followed = asyncio.Event()  # set by the first `end_of_checkpoints`
        self.asked: list[tuple[str, str]] = []
        self.started: dict[str, str] = {}
        self.positions: dict[str, LogPosition] = {}
        self.away = False
        self.refused = 0

    async def teachers(self, pool: str) -> list[str]:  # noqa: ARG002
        self._fail_if_away()
        return self.registered

    async def other_pools(self, pool: str) -> str:  # noqa: ARG002
        self._fail_if_away()
        return self.others

    async def members(self, pool: str, role: str) -> list[Any]:  # noqa: ARG002
        self._fail_if_away()
        return []

    async def progress(self, job: str) -> Progress | None:
        self._fail_if_away()
        return self.reports.get(job)

    async def training(self, job: str) -> TrainingStatus | None:
        self._fail_if_away()
        return self.trainings.get(job)

    async def generations(self, job: str) -> int:
        self._fail_if_away()
        return 3 if job in self.trainings else 0

    async def request_stop(self, job: str, reason: str) -> bool:
        self._fail_if_away()
        if job in self.trainings:
            self.asked.append((job, reason))
        return job in self.trainings

    async def checkpoint(self, stream: str, job: str, since: float) -> CheckpointResult | None:  # noqa: ARG002
        self._fail_if_away()
        found = (one for one in reversed(self.saved) if one and one["job"] == job and one["at"] >= since)
        return next(found, None)

    async def end_of_checkpoints(self, stream: str) -> str:  # noqa: ARG002
        self._fail_if_away()
        self.followed.set()
        return str(len(self.saved))

    async def next_checkpoints(
        self,
        stream: str,  # noqa: ARG002
        last_id: str,
        *,
        block_ms: int = 1000,
    ) -> list[tuple[str, CheckpointResult | None]]:
        self._fail_if_away()
        if block_ms:
            await asyncio.sleep(0.01)
        first = int(last_id or 0)
        return [(str(number), self.saved[number - 1]) for number in range(first + 1, len(self.saved) + 1)]

    async def started_by(self, job: str) -> str:
        self._fail_if_away()
        return self.started.get(job, "")

    async def save_started_by(self, job: str, token: str) -> None:
        self._fail_if_away()
        self.started[job] = token

    async def log_position(self, job: str) -> LogPosition | None:
        self._fail_if_away()
        return self.positions.get(job)

    async def save_log_position(self, job: str, position: LogPosition) -> None:
        self._fail_if_away()
        self.positions[job] = position

    def _fail_if_away(self) -> None:
        if self.away:
            self.refused += 1
            raise RegistryUnavailableError("nowhere:1", "connection refused")


def job_status(name: str, token: str = "try-1", **changes: Any) -> JobStatus:
    """A job of elastic trainers that runs, unless changed."""
    given: dict[str, Any] = {"kind": "trainer", "phase": "running", "digest": "d", "wanted": 1, "created_at": 100.0}
    return JobStatus(name=name, token=token, **{**given, "elastic": True, **changes})


def failed_status(name: str, exit_code: int, *lines: str, token: str = "try-1") -> JobStatus:
    """A job whose first instance ended with `exit_code`."""
    instance = InstanceStatus(index=0, phase="failed", started_at=100.0, exit_code=exit_code)
    reason = f"instance 0 ended with {exit_code}"
    return job_status(name, token, phase="failed", instances=(instance,), reason=reason, last_lines=lines)


def degraded_pool(reason: str) -> JobStatus:
    """A pool of two of which one was given up."""
    up = InstanceStatus(index=0, phase="running", started_at=100.0)
    down = InstanceStatus(index=1, phase="failed", started_at=100.0, exit_code=EX_CONFIG, given_up=True)
    given: dict[str, Any] = {"kind": "pool", "wanted": 2, "instances": (up, down), "reason": reason}
    return job_status("digits", **given, last_lines=("another model",))


def saved(step: int, **changes: Any) -> CheckpointResult:
    """A checkpoint of the job "student", unless changed."""
    given = {"job": "student", "checkpoint": f"/c/{step}", "step": step, "epoch": 1, "metrics": {}, "at": 100.0 + step}
    return msgspec.convert({**given, **changes}, CheckpointResult)


def spec_of(**changes: Any) -> TaskSpec:
    """A pool of two and a student, unless changed."""
    given: dict[str, Any] = {
        "conn_id": "edl_default",
        "place": LocalBackendRef("/w"),
        "token": "try-1",
        "pool": "digits",
        "pool_job": POOL,
        "at_least": 2,
        "pool_deadline": 1e12,
        "wait_timeout_s": 60,
        "trainer_job": STUDENT,
        "progress_every_s": 0,
    }
    return TaskSpec(**{**given, **changes})


class FakeTaskInstance(SimpleNamespace):
    """A task instance with XComs and a `state`."""

    max_tries = 0

    def get_task_states(self, **_: Any) -> dict[str, dict[str, str]]:
        return {self.run_id: {self.task_id: self.state}}

    def xcom_push(self, key: str, value: Any) -> None:
        self.xcoms[key] = value


def rendered(operator: Any, context: Any) -> Any:
    """The operator with rendered templates, as before `execute`."""
    operator.render_template_fields(context)
    return operator


def deferred_by(operator: Any, context: Any) -> TaskDeferred:
    """Execute a task until it defers."""
    with pytest.raises(TaskDeferred) as caught:
        operator.execute(context)
    return caught.value


def succeed(operator: Any, context: Any) -> None:
    """Record that a task has succeeded, and then call who wants to know, as Airflow does."""
    context["ti"].state = "success"
    for callback in operator.on_success_callback:
        callback(context)


def event_of(deferred: TaskDeferred, outcome: TaskOutcome) -> dict[str, Any]:
    """The trigger's event: the outcome and the trigger's arguments."""
    return {**msgspec.to_builtins(outcome), **deferred.trigger.serialize()[1]}
