"""Rescaling that others, or an outage, interfere with: nothing swings, and what is left undone the next pass does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.backends.jobs import WAITS, eventually

from edl_runtime.autoscale.jobs import Job, Node, Target
from edl_runtime.autoscale.plan import Rules
from edl_runtime.autoscale.policy import decide
from edl_runtime.autoscale.rescale import last_plan, rescale
from edl_runtime.backends.base import Capacity, JobStatus
from edl_runtime.backends.local import LocalBackend
from edl_runtime.errors import BackendError, ClusterUnavailableError, RegistryUnavailableError, RescalingError
from edl_runtime.pods import Pod
from edl_runtime.specs import Bounds, JobSpec
from edl_runtime.store.client import connect
from edl_runtime.store.server import RedisServer

LITTLE = "1m"
"""The CPU that an instance reserves: the rules leave a few thousandths of a CPU."""


@pytest.fixture
async def backend(work_dir: Path) -> AsyncIterator[LocalBackend]:
    made = LocalBackend(work_dir)
    yield made
    for job in await made.list():
        await made.delete(job.name)


async def submit(backend: LocalBackend, name: str, bounds: Bounds, instances: int, *, keeps: bool = False) -> None:
    """Start a job; with `keeps`, of trainers that would go on from a checkpoint."""
    spec = JobSpec(
        name=name,
        kind="trainer",
        command=("python", "-c", WAITS),
        bounds=bounds,
        instances=instances,
        elastic=True,
        env={"EDL_CHECKPOINT": "/nowhere"} if keeps else {},
        pod=Pod(resources={"cpu": LITTLE}),
    )
    await backend.submit(spec, token="test/1", secrets={})

    async def is_up() -> bool:
        running = [one for one in (await backend.get(name)).instances if one.phase == "running"]
        return len(running) == instances

    await eventually(is_up, f"all instances of {name}")


async def rules_for(backend: LocalBackend, instances: int) -> Rules:
    """Return rules under which so many instances have room."""
    (node,) = (await backend.capacity()).nodes
    return Rules(max_load=(instances + 0.5) * 0.001 / node.total["cpu"])


async def wanted(backend: LocalBackend) -> dict[str, int]:
    return {job.name: job.wanted for job in await backend.list()}


async def test_two_at_once_come_one_after_the_other(backend: LocalBackend, redis_url: str, namespace: str) -> None:
    """The second decides by what the first has done, and has nothing to change."""
    await submit(backend, "first", Bounds(1, 9), 6)
    await submit(backend, "second", Bounds(1, 9), 1)
    rules = await rules_for(backend, 6)
    decided = 0

    def slowly(
        jobs: Sequence[Job], nodes: Sequence[Node], capacity: Mapping[str, float], *, now_s: float, pause_s: float
    ) -> Mapping[str, Target]:
        nonlocal decided
        decided += 1
        time.sleep(0.1)
        return decide(jobs, nodes, capacity, now_s=now_s, pause_s=pause_s)

    async with connect(redis_url) as client:
        with capture_logs() as said:
            both = await asyncio.gather(
                *(rescale(backend, client, namespace, rules, policy=slowly) for _ in range(2)),
            )
        assert [line["event"] for line in said].count("rescaling.waits") == 1
        changes = sorted(len(done.plan.changes) for done in both)
        assert changes == [0, 2]
        assert decided == 2
        assert await wanted(backend) == {"first": 3, "second": 3}
        assert await last_plan(client, namespace) == max((done.plan for done in both), key=lambda plan: plan.at)


async def test_a_dry_run_changes_nothing(backend: LocalBackend, redis_url: str, namespace: str) -> None:
    """Not even what others are shown as the last plan."""
    await submit(backend, "first", Bounds(1, 9), 6)
    rules = await rules_for(backend, 3)
    async with connect(redis_url) as client:
        done = await rescale(backend, client, namespace, rules, dry_run=True)
        assert [(one.instances, one.target) for one in done.plan.targets] == [(6, 3)]
        assert await wanted(backend) == {"first": 6}
        assert await last_plan(client, namespace) is None


class EndsWhenLooked(LocalBackend):
    """A backend of which one job ends between the look and the resize."""

    async def resize(self, name: str, instances: int) -> JobStatus:
        if name == "ends":
            await self.delete("ends")
        return await super().resize(name, instances)


async def test_a_job_that_ends_meanwhile_keeps_nobody(work_dir: Path, redis_url: str, namespace: str) -> None:
    """It is told, and all others are resized."""
    backend = EndsWhenLooked(work_dir)
    try:
        await submit(backend, "ends", Bounds(1, 9), 5)
        await submit(backend, "stays", Bounds(1, 9), 1)
        async with connect(redis_url) as client:
            done = await rescale(backend, client, namespace, await rules_for(backend, 6))
        assert list(done.refused) == ["ends"]
        assert done.refused["ends"].startswith("no job or pool named 'ends'")
        assert await wanted(backend) == {"stays": 3}
    finally:
        for job in await backend.list():
            await backend.delete(job.name)


class Refusing(LocalBackend):
    """A backend that can't resize some jobs, as one whose supervisor hangs."""

    def __init__(self, work_dir: Path, *refused: str) -> None:
        super().__init__(work_dir)
        self._refused = refused

    async def resize(self, name: str, instances: int) -> JobStatus:
        if name in self._refused:
            raise BackendError(f"the supervisor of {name!r} does not answer")
        return await super().resize(name, instances)


async def test_what_a_job_keeps_that_cannot_shrink_is_not_for_others(
    backend: LocalBackend, work_dir: Path, redis_url: str, namespace: str
) -> None:
    """It is told, the others share the rest, and never more than there is for them; all of it in one pass."""
    await submit(backend, "hangs", Bounds(1, 9), 5)
    await submit(backend, "large", Bounds(1, 9), 4)
    await submit(backend, "small", Bounds(1, 9), 1)
    rules = await rules_for(backend, 9)
    async with connect(redis_url) as client:
        meant = (await rescale(backend, client, namespace, rules, dry_run=True)).plan
        assert {one.name: one.target for one in meant.targets} == {"hangs": 3, "large": 3, "small": 3}
        done = await rescale(Refusing(work_dir, "hangs"), client, namespace, rules)
        assert done.refused == {"hangs": "the supervisor of 'hangs' does not answer"}
        assert await wanted(backend) == {"hangs": 5, "large": 2, "small": 2}
        assert {one.name: one.target for one in done.plan.targets} == {"hangs": 5, "large": 2, "small": 2}
        assert done.plan.targets[0].reason == "stays as it is: the supervisor of 'hangs' does not answer"


async def test_who_has_shrunk_for_what_is_not_to_be_any_more_gets_it_back(
    backend: LocalBackend, work_dir: Path, redis_url: str, namespace: str
) -> None:
    """As for a job that needs the room of two, one of which can't shrink. The plan is what there is then."""

    def for_a_third(jobs: Sequence[Job], *_: object, **__: object) -> Mapping[str, Target]:
        return {job.name: Target(instances=3 - len(jobs), reason="as said") for job in jobs}

    await submit(backend, "hangs", Bounds(1, 4), 2)
    await submit(backend, "shrinks", Bounds(1, 4), 2)
    async with connect(redis_url) as client:
        done = await rescale(Refusing(work_dir, "hangs"), client, namespace, Rules(), policy=for_a_third)
        assert list(done.refused) == ["hangs"]
        assert {one.name: one.target for one in done.plan.targets} == {"hangs": 2, "shrinks": 2}
        assert await wanted(backend) == {"hangs": 2, "shrinks": 2}


async def test_that_a_job_cannot_grow_keeps_nobody(
    backend: LocalBackend, work_dir: Path, redis_url: str, namespace: str
) -> None:
    """And a pass in which nothing could be done fails by what it met."""
    await submit(backend, "hangs", Bounds(1, 4), 1)
    await submit(backend, "small", Bounds(1, 4), 1)
    rules = await rules_for(backend, 6)
    async with connect(redis_url) as client:
        with pytest.raises(BackendError, match=r"supervisor of '(hangs|small)' does not answer"):
            await rescale(Refusing(work_dir, "hangs", "small"), client, namespace, rules)
        assert await last_plan(client, namespace) is None
        done = await rescale(Refusing(work_dir, "hangs"), client, namespace, rules)
        assert list(done.refused) == ["hangs"]
        assert await wanted(backend) == {"hangs": 1, "small": 3}


class BreaksAfterOne(LocalBackend):
    """A backend that is lost after its first resize."""

    def __init__(self, work_dir: Path) -> None:
        super().__init__(work_dir)
        self._first = ""
        self._is_done = asyncio.Event()

    async def resize(self, name: str, instances: int) -> JobStatus:
        if self._first:
            await self._is_done.wait()
            raise ClusterUnavailableError("https://cluster", "timed out")
        self._first = name
        done = await super().resize(name, instances)
        self._is_done.set()
        return done


async def test_what_is_left_undone_the_next_pass_completes(
    backend: LocalBackend, work_dir: Path, redis_url: str, namespace: str
) -> None:
    """As decided before, without going back on what was done."""
    for number in range(4):
        await submit(backend, f"job-{number}", Bounds(1, 9), 5)
    rules = await rules_for(backend, 8)
    async with connect(redis_url) as client:
        meant = (await rescale(backend, client, namespace, rules, dry_run=True)).plan
        with pytest.raises(ClusterUnavailableError):
            await rescale(BreaksAfterOne(work_dir), client, namespace, rules)
        half = await wanted(backend)
        assert sorted(half.values()) == [2, 5, 5, 5]
        done = await rescale(backend, client, namespace, rules)
        assert len(done.plan.changes) == 3
        assert await wanted(backend) == {one.name: one.target for one in meant.targets}
        assert not (await rescale(backend, client, namespace, rules)).plan.changes


class Silent(LocalBackend):
    """A backend that does not answer."""

    async def capacity(self) -> Capacity:
        await asyncio.sleep(600)
        raise AssertionError


async def test_a_pass_that_takes_too_long_is_given_up(
    backend: LocalBackend, work_dir: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was decided by may be so no more. Nothing is changed, and the next pass need not wait for it."""
    await submit(backend, "first", Bounds(1, 9), 6)
    rules = await rules_for(backend, 3)
    async with connect(redis_url) as client:
        monkeypatch.setattr("edl_runtime.autoscale.rescale.PASS_S", 0.5)
        with pytest.raises(RescalingError, match=r"has not ended within 0\.5 s"):
            await rescale(Silent(work_dir), client, namespace, rules)
        monkeypatch.undo()
        assert await wanted(backend) == {"first": 6}
        began = time.monotonic()
        await rescale(backend, client, namespace, rules)
        assert time.monotonic() - began < 5
        assert await wanted(backend) == {"first": 3}


async def test_without_redis_nothing_is_changed(backend: LocalBackend, own_redis: RedisServer, namespace: str) -> None:
    """A pass fails clearly while Redis is away; jobs stay as they are until one can be made."""
    await submit(backend, "first", Bounds(1, 9), 6)
    rules = await rules_for(backend, 3)
    async with connect(own_redis.url) as client:
        own_redis.stop()
        with pytest.raises(RegistryUnavailableError):
            await rescale(backend, client, namespace, rules)
        assert await wanted(backend) == {"first": 6}
        own_redis.start()
        await rescale(backend, client, namespace, rules)
        assert await wanted(backend) == {"first": 3}


async def test_who_has_no_room_is_suspended_and_comes_back(
    backend: LocalBackend, redis_url: str, namespace: str
) -> None:
    """Nobody runs with fewer than its minimum, and who comes back waits some minutes before that."""
    await submit(backend, "first", Bounds(4, 4), 4, keeps=True)
    await submit(backend, "second", Bounds(3, 6), 3, keeps=True)
    few, many = [await rules_for(backend, instances) for instances in (5, 10)]
    async with connect(redis_url) as client:
        await rescale(backend, client, namespace, few)
        assert await wanted(backend) == {"first": 0, "second": 5}
        at_once = await rescale(backend, client, namespace, many)
        assert at_once.plan.targets[0].reason == "waits: it was resized within the last minutes"
        assert (await wanted(backend))["first"] == 0
        await rescale(backend, client, namespace, many, policy=_in_ten_minutes)
        assert await wanted(backend) == {"first": 4, "second": 6}

        async def all_run() -> bool:
            return all(job.phase == "running" for job in await backend.list())

        await eventually(all_run, "both jobs")


def _in_ten_minutes(
    jobs: Sequence[Job], nodes: Sequence[Node], capacity: Mapping[str, float], *, now_s: float, pause_s: float
) -> Mapping[str, Target]:
    return decide(jobs, nodes, capacity, now_s=now_s + 600, pause_s=pause_s)
