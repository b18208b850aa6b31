"""Pools and elastic trainers whose instances give up (exit status 78)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.backends.jobs import (
    WAITS,
    add_slots,
    ended,
    eventually,
    exits_at,
    exits_without_slot,
    job,
    lines,
    reach,
    wait_for_line,
)

from edl_runtime.backends.interface import Backend, JobStatus
from edl_runtime.errors import EX_CONFIG, EX_DATAERR
from edl_runtime.specs import Bounds, JobKind, JobSpec

ALL = "print('no such model'); raise SystemExit(78)"
NEVER_AT_1 = exits_at("1", EX_CONFIG) + WAITS
"""Instance 1 can never work as configured; the others do."""


def has_given_up(status: JobStatus) -> bool:
    return any(instance.given_up for instance in status.instances)


async def job_with_one_given_up(backend: Backend, folder: Path, spec: JobSpec) -> JobStatus:
    """Submit a job of two instances, of which the later one finds no slot and gives up; return its status.

    Of trainers that is instance 1; a pool's instances are numbered by age, in seconds where a cluster tells it.
    """
    add_slots(folder, 1)
    await backend.submit(spec, token="mine", secrets={})
    await wait_for_line(backend, "up")
    await backend.resize("job", 2)
    return await reach(backend, "job", has_given_up)


@pytest.mark.on_pods
async def test_a_pool_keeps_running_without_an_instance_that_exits_with_78(backend: Backend, tmp_path: Path) -> None:
    """Only that instance is given up; the status has the reason and how many instances are attainable."""
    status = await job_with_one_given_up(backend, tmp_path, job(exits_without_slot(tmp_path) + WAITS))
    assert (status.phase, status.wanted, status.attainable) == ("running", 2, 1)
    healthy, bad = sorted((await backend.get("job")).instances, key=lambda instance: instance.given_up)
    assert status.reason == f"instance {bad.index} exited with 78, which says that it can never work as configured"
    assert status.last_lines == ("no such model",)
    assert (healthy.phase, healthy.restarts, healthy.given_up) == ("running", 0, False)
    assert (bad.phase, bad.given_up, bad.exit_code) == ("failed", True, EX_CONFIG)


@pytest.mark.on_pods
async def test_growing_a_pool_restarts_an_instance_that_was_given_up(backend: Backend, tmp_path: Path) -> None:
    """The other instances are not restarted."""
    await job_with_one_given_up(backend, tmp_path, job(exits_without_slot(tmp_path) + WAITS))
    add_slots(tmp_path, 3)  # one more than is needed: a restart in progress may take one and end
    await backend.resize("job", 3)
    await wait_for_line(backend, "up", instances=3)
    assert await lines(backend, instance=0) == [(0, "up")]
    status = await reach(backend, "job", lambda status: not has_given_up(status))
    assert (status.reason, status.attainable) == ("", 3)


async def test_shrinking_a_pool_removes_the_instance_that_was_given_up(backend: Backend, tmp_path: Path) -> None:
    """The pool's status has no reason any more."""
    await job_with_one_given_up(backend, tmp_path, job(exits_without_slot(tmp_path) + WAITS))
    assert (await backend.resize("job", 1)).wanted == 1
    status = await reach(backend, "job", lambda status: len(status.instances) == 1)
    assert (status.phase, status.reason, status.last_lines, status.attainable) == ("running", "", (), 1)


EXITS_ON_FILE = """
import os, pathlib, sys, time
print("up")
go = pathlib.Path(os.environ["GO"])
while not go.exists():
    time.sleep(0.02)
sys.exit(int(go.read_text() or 0))
"""


@pytest.mark.on_pods
async def test_elastic_trainers_keep_running_without_one_that_exits_with_78(backend: Backend, tmp_path: Path) -> None:
    """Growing the job restarts it; the job's outcome is that of the others."""
    code = exits_without_slot(tmp_path, "another dataset") + EXITS_ON_FILE
    spec = job(code, kind="trainer", elastic=True, env={"GO": str(tmp_path / "go")})
    status = await job_with_one_given_up(backend, tmp_path, spec)
    reason = "instance 1 exited with 78, which says that it can never work as configured"
    assert (status.phase, status.reason, status.last_lines) == ("running", reason, ("another dataset",))
    assert status.attainable == 1
    add_slots(tmp_path, 1)
    await backend.resize("job", 3)
    await wait_for_line(backend, "up", instances=2)

    async def another_gave_up() -> bool:
        return [line for _, line in await lines(backend)].count("another dataset") == 2

    await eventually(another_gave_up, "one more without a slot")
    status = await reach(backend, "job", has_given_up)
    assert (status.wanted, status.attainable) == (3, 2)
    (tmp_path / "go").touch()
    status = await ended(backend)
    assert (status.phase, status.reason) == ("succeeded", "")
    assert sorted(instance.given_up for instance in status.instances) == [False, False, True]


@pytest.mark.parametrize(("kind", "least", "code"), [("pool", 1, ALL), ("trainer", 1, ALL), ("trainer", 2, NEVER_AT_1)])
async def test_a_job_fails_when_fewer_than_its_minimum_are_left(
    backend: Backend, kind: JobKind, least: int, code: str
) -> None:
    """When all instances have exited with 78, or so many that the minimum of elastic trainers is out of reach."""
    spec = job(code, kind=kind, elastic=kind == "trainer", instances=2)
    await backend.submit(msgspec.structs.replace(spec, bounds=Bounds(least, 4)), token="mine", secrets={})
    status = await ended(backend)
    assert (status.phase, status.last_lines, status.failed_permanently) == ("failed", ("no such model",), True)
    assert status.reason.endswith("exited with 78, which says that it can never work as configured")


@pytest.mark.parametrize(("exit_code", "is_permanent"), [(EX_DATAERR, True), (1, False)])
async def test_the_exit_status_of_an_elastic_trainer_fails_the_job(
    backend: Backend, tmp_path: Path, exit_code: int, *, is_permanent: bool
) -> None:
    """Any that is neither 0 nor 78, also when another instance has given up; 65 is a permanent failure."""
    code = exits_at("1", EX_CONFIG) + EXITS_ON_FILE
    spec = job(code, kind="trainer", elastic=True, instances=2, env={"GO": str(tmp_path / "go")})
    await backend.submit(spec, token="mine", secrets={})
    await reach(backend, "job", has_given_up)
    (tmp_path / "code").write_text(str(exit_code))
    (tmp_path / "code").rename(tmp_path / "go")
    status = await ended(backend)
    assert (status.phase, status.reason) == ("failed", f"instance 0 exited with {exit_code}")
    assert status.failed_permanently is is_permanent
