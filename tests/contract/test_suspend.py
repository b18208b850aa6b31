"""Suspending and resuming jobs and pools."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from support.backends.jobs import (
    EXITS_GRACEFULLY,
    GRACE_S,
    WAITS,
    eventually,
    followed,
    job,
    lines,
    reach,
    wait_for_line,
)

from edl_runtime.backends.interface import MAX_REASON_LENGTH, SUSPENDED, Backend, JobStatus
from edl_runtime.specs import Bounds, JobKind, JobSpec

KINDS: tuple[JobKind, ...] = ("pool", "trainer")
TRAINER_FIRST = ("trainer", pytest.param("pool", marks=pytest.mark.deep))
"""Pools in `make test-deep` only."""


def two(kind: JobKind, code: str = WAITS, **more: Any) -> JobSpec:
    """Return the spec of a job that has two instances at least."""
    return msgspec.structs.replace(job(code, kind=kind, instances=2, **more), bounds=Bounds(2, 4))


def is_empty(status: JobStatus) -> bool:
    return not status.instances


def runs(status: JobStatus) -> bool:
    return [one.phase for one in status.instances] == ["running"] * status.wanted


async def suspended(backend: Backend) -> JobStatus:
    """Suspend the job and return its status once its instances have left."""
    await backend.resize("job", 0)
    return await reach(backend, "job", is_empty)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.on_pods
async def test_a_suspended_job_has_no_instances_and_resumes_with_the_given_number(
    backend: Backend, kind: JobKind
) -> None:
    """0 is allowed whatever the bounds; a suspended job is pending, with a reason."""
    submitted = await backend.submit(two(kind), token="mine", secrets={})
    await wait_for_line(backend, "up", instances=2)
    answer = await backend.resize("job", 0)
    assert (answer.wanted, answer.phase, answer.reason, answer.is_suspended) == (0, "pending", SUSPENDED, True)
    status = await reach(backend, "job", is_empty)
    assert (status.wanted, status.phase, status.reason, status.attainable) == (0, "pending", SUSPENDED, 0)
    assert [(one.name, one.phase) for one in await backend.list()] == [("job", "pending")]
    await backend.resize("job", 3)
    status = await reach(backend, "job", runs)
    assert (status.wanted, status.phase, status.reason, status.is_suspended) == (3, "running", "", False)
    assert [one.restarts for one in status.instances] == [0, 0, 0]
    assert (status.created_at, status.digest) == (submitted.created_at, submitted.digest)


@pytest.mark.on_pods
async def test_a_suspended_job_says_why_until_the_next_resize(backend: Backend) -> None:
    """In the words of who has suspended it, as of a rescaling pass."""
    await backend.submit(two("trainer"), token="mine", secrets={})
    why = "waits: no node has room for its minimum of 2"
    assert (await backend.resize("job", 0, reason=why)).reason == why
    status = await reach(backend, "job", is_empty)
    assert (status.reason, status.scaling and status.scaling.resized_for) == (why, why)
    assert (await backend.resize("job", 0, reason="x" * 1_000)).reason == "x" * MAX_REASON_LENGTH
    assert (await backend.resize("job", 0)).reason == SUSPENDED


@pytest.mark.parametrize("elastic", [pytest.param(False, marks=pytest.mark.deep), True])
async def test_a_trainer_job_may_be_suspended_many_times(backend: Backend, *, elastic: bool) -> None:
    """More often than an instance may fail: being suspended is no failure."""
    await backend.submit(two("trainer", elastic=elastic), token="mine", secrets={})
    for _ in range(6):
        await reach(backend, "job", runs)
        await suspended(backend)
    await backend.resize("job", 2)
    status = await reach(backend, "job", runs)
    assert [one.restarts for one in status.instances] == [0, 0]


@pytest.mark.parametrize("kind", ["pool", pytest.param("trainer", marks=pytest.mark.deep)])
@pytest.mark.on_pods
async def test_a_suspended_job_is_adopted_replaced_and_deleted_like_any_other(backend: Backend, kind: JobKind) -> None:
    """A try that adopts it keeps it suspended; a job that replaces it is not suspended."""
    first = await backend.submit(two(kind), token="first", secrets={})
    await suspended(backend)
    second = await backend.submit(two(kind), token="second", secrets={})
    assert (second.created_at, second.token, second.wanted) == (first.created_at, "second", 0)
    assert (await reach(backend, "job", is_empty)).is_suspended
    assert not await backend.delete("job", token="first")
    other = two(kind, f"{WAITS}  # another")
    assert (await backend.submit(other, token="mine", secrets={})).wanted == 2
    assert (await reach(backend, "job", runs)).phase == "running"
    await suspended(backend)
    assert await backend.delete("job", token="mine")
    assert await backend.list() == []


@pytest.mark.parametrize("kind", TRAINER_FIRST)
@pytest.mark.on_pods
async def test_suspending_a_job_gives_instances_their_grace_period(backend: Backend, kind: JobKind) -> None:
    """A followed log has their last lines, and those of the instances after the resume."""
    await backend.submit(two(kind, EXITS_GRACEFULLY, grace_s=GRACE_S), token="mine", secrets={})
    await wait_for_line(backend, "up", instances=2)
    async with followed(backend) as seen:
        await suspended(backend)
        assert {line for _, line in await lines(backend)} <= {"up", "goodbye"}  # it can be read meanwhile
        await backend.resize("job", 2)
        await reach(backend, "job", runs)

        async def all_lines_seen() -> bool:
            return seen == [(number, line) for number in range(2) for line in ("up", "goodbye", "up")]

        await eventually(all_lines_seen, f"the lines of all instances, of {seen}")


@pytest.mark.parametrize("kind", TRAINER_FIRST)
@pytest.mark.on_pods
async def test_a_job_may_be_resumed_while_its_instances_terminate(backend: Backend, kind: JobKind) -> None:
    """They end, and others replace them."""
    await backend.submit(two(kind, EXITS_GRACEFULLY, grace_s=GRACE_S), token="mine", secrets={})
    await wait_for_line(backend, "up", instances=2)
    before = await reach(backend, "job", runs)
    await backend.resize("job", 0)
    await backend.resize("job", 2)

    def are_others(status: JobStatus) -> bool:
        return runs(status) and all(
            now.started_at > then.started_at for now, then in zip(status.instances, before.instances, strict=True)
        )

    assert (await reach(backend, "job", are_others)).phase == "running"


async def test_the_status_has_the_time_of_the_last_resize(backend: Backend) -> None:
    """Of the last one that changed the size; a new job has none."""
    await backend.submit(two("pool"), token="mine", secrets={})
    same = await backend.resize("job", 2)
    assert same.scaling is not None
    assert same.scaling.resized_at is None
    for instances in (0, 2, 4):
        began = time.time()
        await backend.resize("job", instances)
        scaling = (await backend.get("job")).scaling
        assert scaling is not None
        assert scaling.resized_at is not None
        assert began <= scaling.resized_at <= time.time()
    again = await backend.submit(two("pool", f"{WAITS}  # another"), token="mine", secrets={})
    assert again.scaling is not None
    assert again.scaling.resized_at is None
