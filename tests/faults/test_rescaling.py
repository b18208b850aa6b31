"""Rescaling that others, or an outage, interfere with: nothing swings, and what is left undone the next pass does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.autoscale.jobs import job

from edl_runtime.autoscale.jobs import Job, Target
from edl_runtime.autoscale.plan import Rules
from edl_runtime.autoscale.policy import decide
from edl_runtime.autoscale.rescale import Rescaled, last_plan, rescale
from edl_runtime.backends.base import Capacity, JobStatus, NodeCapacity
from edl_runtime.backends.local import LocalBackend
from edl_runtime.errors import (
    BackendError,
    ClusterUnavailableError,
    RegistryUnavailableError,
    RescalingError,
    UnknownJobError,
)
from edl_runtime.specs import Bounds
from edl_runtime.store.client import connect
from edl_runtime.store.server import RedisServer

CPUS = 40
WIDE = Bounds(1, 9)


class Jobs(LocalBackend):
    """Jobs on a node of 40 CPUs, one for each instance. They are resized at once, but the supervisors of some hang."""

    hang: tuple[str, ...] = ()

    def __init__(self, *jobs: JobStatus) -> None:
        super().__init__(Path("/nowhere"))
        self.jobs = {each.name: each for each in jobs}

    @property
    def wanted(self) -> dict[str, int]:
        return {name: each.wanted for name, each in self.jobs.items()}

    async def list(self) -> list[JobStatus]:
        return [*self.jobs.values()]

    async def capacity(self) -> Capacity:
        free = CPUS - sum(self.wanted.values())
        return Capacity(nodes=(NodeCapacity(name="node", total={"cpu": CPUS}, free={"cpu": free}),))

    async def resize(self, name: str, instances: int) -> JobStatus:
        if name in self.hang:
            raise BackendError(f"the supervisor of {name!r} does not answer")
        if name not in self.jobs:
            raise UnknownJobError(name)
        before = self.jobs[name].scaling
        assert before
        self.jobs[name] = job(name, before.bounds, 1.0, instances, resized_at=time.time())
        return self.jobs[name]


def has(name: str, instances: int, bounds: Bounds = WIDE) -> JobStatus:
    return job(name, bounds, 1.0, instances)


def rules(instances: int) -> Rules:
    """Return rules under which so many instances have room."""
    return Rules(max_load=instances / CPUS)


def targets(done: Rescaled) -> dict[str, int]:
    return {one.name: one.target for one in done.plan.targets}


class HasCompany(Jobs):
    """A backend that tells what there is once another pass waits."""

    def __init__(self, said: Sequence[Mapping[str, Any]], *jobs: JobStatus) -> None:
        super().__init__(*jobs)
        self._said = said

    async def capacity(self) -> Capacity:
        while not any(line["event"] == "rescaling.waits" for line in self._said):  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.01)
        return await super().capacity()


async def test_two_at_once_come_one_after_the_other(redis_url: str, namespace: str) -> None:
    """The second decides by what the first has done, and has nothing to change."""
    async with connect(redis_url) as client:
        with capture_logs() as said:
            backend = HasCompany(said, has("first", 6), has("second", 1))
            both = await asyncio.gather(*(rescale(backend, client, namespace, rules(6)) for _ in range(2)))
        assert [line["event"] for line in said].count("rescaling.waits") == 1
        assert sorted(len(done.plan.changes) for done in both) == [0, 2]
        assert backend.wanted == {"first": 3, "second": 3}
        assert await last_plan(client, namespace) == max((done.plan for done in both), key=lambda plan: plan.at)


class EndsMeanwhile(Jobs):
    """A backend of which one job ends between the look and the resize."""

    async def resize(self, name: str, instances: int) -> JobStatus:
        self.jobs.pop("ends", None)
        return await super().resize(name, instances)


async def test_a_job_that_ends_meanwhile_keeps_nobody(redis_url: str, namespace: str) -> None:
    """It is told, and all others are resized."""
    backend = EndsMeanwhile(has("ends", 5), has("stays", 1))
    async with connect(redis_url) as client:
        done = await rescale(backend, client, namespace, rules(6))
    assert list(done.refused) == ["ends"]
    assert done.refused["ends"].startswith("no job or pool named 'ends'")
    assert backend.wanted == {"stays": 3}


async def test_what_a_job_keeps_that_cannot_shrink_is_not_for_others(redis_url: str, namespace: str) -> None:
    """It is told, the others share the rest, and never more than there is for them; all of it in one pass."""
    backend = Jobs(has("hangs", 5), has("large", 4), has("small", 1))
    backend.hang = ("hangs",)
    async with connect(redis_url) as client:
        meant = await rescale(backend, client, namespace, rules(9), dry_run=True)
        assert targets(meant) == {"hangs": 3, "large": 3, "small": 3}
        assert backend.wanted == {"hangs": 5, "large": 4, "small": 1}
        assert await last_plan(client, namespace) is None, "a dry run is shown to nobody else"
        done = await rescale(backend, client, namespace, rules(9))
    assert done.refused == {"hangs": "the supervisor of 'hangs' does not answer"}
    assert backend.wanted == targets(done) == {"hangs": 5, "large": 2, "small": 2}
    assert done.plan.targets[0].reason == "stays as it is: the supervisor of 'hangs' does not answer"


async def test_who_has_shrunk_for_what_is_not_to_be_any_more_gets_it_back(redis_url: str, namespace: str) -> None:
    """As for a job that needs the room of two, one of which can't shrink. The plan is what there is then."""

    def for_a_third(jobs: Sequence[Job], *_: object, **__: object) -> Mapping[str, Target]:
        return {job.name: Target(instances=3 - len(jobs), reason="as said") for job in jobs}

    backend = Jobs(has("hangs", 2), has("shrinks", 2))
    backend.hang = ("hangs",)
    async with connect(redis_url) as client:
        done = await rescale(backend, client, namespace, Rules(), policy=for_a_third)
    assert list(done.refused) == ["hangs"]
    assert backend.wanted == targets(done) == {"hangs": 2, "shrinks": 2}


async def test_that_a_job_cannot_grow_keeps_nobody(redis_url: str, namespace: str) -> None:
    """And a pass in which nothing could be done fails by what it met."""
    backend = Jobs(has("hangs", 1, Bounds(1, 4)), has("small", 1, Bounds(1, 4)))
    backend.hang = ("hangs", "small")
    async with connect(redis_url) as client:
        with pytest.raises(BackendError, match=r"supervisor of '(hangs|small)' does not answer"):
            await rescale(backend, client, namespace, rules(6))
        assert await last_plan(client, namespace) is None
        backend.hang = ("hangs",)
        done = await rescale(backend, client, namespace, rules(6))
    assert list(done.refused) == ["hangs"]
    assert backend.wanted == {"hangs": 1, "small": 3}


class BreaksAfterOne(Jobs):
    """A backend that is lost after its first resize."""

    is_lost = False

    async def resize(self, name: str, instances: int) -> JobStatus:
        if self.is_lost:
            raise ClusterUnavailableError("https://cluster", "timed out")
        self.is_lost = True
        return await super().resize(name, instances)


async def test_what_is_left_undone_the_next_pass_completes(redis_url: str, namespace: str) -> None:
    """As decided before, without going back on what was done."""
    backend = BreaksAfterOne(*(has(f"job-{number}", 5) for number in range(4)))
    async with connect(redis_url) as client:
        meant = await rescale(backend, client, namespace, rules(8), dry_run=True)
        with pytest.raises(ClusterUnavailableError):
            await rescale(backend, client, namespace, rules(8))
        assert sorted(backend.wanted.values()) == [2, 5, 5, 5]
        healed = Jobs(*backend.jobs.values())
        done = await rescale(healed, client, namespace, rules(8))
        assert len(done.plan.changes) == 3
        assert healed.wanted == targets(meant)
        assert not (await rescale(healed, client, namespace, rules(8))).plan.changes


class Silent(Jobs):
    """A backend that does not answer."""

    async def capacity(self) -> Capacity:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_pass_that_takes_too_long_is_given_up(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was decided by may be so no more. Nothing is changed, and the next pass need not wait for it."""
    backend = Silent(has("first", 6))
    async with connect(redis_url) as client:
        monkeypatch.setattr("edl_runtime.autoscale.rescale.PASS_S", 0.2)
        with pytest.raises(RescalingError, match=r"has not ended within 0\.2 s"):
            await rescale(backend, client, namespace, rules(3))
        monkeypatch.undo()
        assert backend.wanted == {"first": 6}
        answers = Jobs(*backend.jobs.values())
        with capture_logs() as said:
            await rescale(answers, client, namespace, rules(3))
    assert "rescaling.waits" not in [line["event"] for line in said]
    assert answers.wanted == {"first": 3}


async def test_without_redis_nothing_is_changed(own_redis: RedisServer, namespace: str) -> None:
    """A pass fails clearly while Redis is away; jobs stay as they are until one can be made."""
    backend = Jobs(has("first", 6))
    async with connect(own_redis.url) as client:
        own_redis.stop()
        with pytest.raises(RegistryUnavailableError):
            await rescale(backend, client, namespace, rules(3))
        assert backend.wanted == {"first": 6}
        own_redis.start()
        await rescale(backend, client, namespace, rules(3))
    assert backend.wanted == {"first": 3}


async def test_who_has_no_room_is_suspended_and_comes_back(redis_url: str, namespace: str) -> None:
    """Nobody runs with fewer than its minimum, and who comes back waits some minutes before that."""

    def in_ten_minutes(*given: Any, now_s: float, pause_s: float) -> Mapping[str, Target]:
        return decide(*given, now_s=now_s + 600, pause_s=pause_s)

    backend = Jobs(has("first", 4, Bounds(4, 4)), has("second", 3, Bounds(3, 6)))
    async with connect(redis_url) as client:
        a_pass = partial(rescale, backend, client, namespace)
        await a_pass(rules(5))
        assert backend.wanted == {"first": 0, "second": 5}
        at_once = await a_pass(rules(10))
        assert at_once.plan.targets[0].reason == "waits: it was resized within the last minutes"
        assert backend.wanted["first"] == 0
        await a_pass(rules(10), policy=in_ten_minutes)
    assert backend.wanted == {"first": 4, "second": 6}
