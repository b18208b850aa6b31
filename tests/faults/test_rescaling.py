"""Rescaling that others, or an outage, interfere with: nothing swings, and what is left undone the next pass does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs
from support.autoscale.backend import CPUS, Jobs
from support.autoscale.jobs import job

from edl_runtime.autoscale.errors import RescalingError
from edl_runtime.autoscale.history import RescaleOutcome, last_pass
from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.autoscale.policy.decide import decide
from edl_runtime.autoscale.policy.model import Target, Workload
from edl_runtime.autoscale.rescale import rescale
from edl_runtime.backends.errors import ClusterUnavailableError
from edl_runtime.backends.interface import JobStatus
from edl_runtime.errors import BackendError
from edl_runtime.specs import Bounds
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

WIDE = Bounds(1, 9)
PLACE = Jobs().place

Pass = Callable[..., Awaitable[RescaleOutcome]]


def has(name: str, instances: int, bounds: Bounds = WIDE) -> JobStatus:
    return job(name, bounds, 1.0, instances)


def targets(done: RescaleOutcome) -> dict[str, int]:
    return {one.name: one.target for one in done.plan.targets}


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    async with connect(redis_url) as made:
        yield made


def passes(client: Redis, namespace: str) -> Pass:
    """Return what makes a pass over the jobs of a backend, with room for so many instances."""

    def make(backend: Jobs, room: int = CPUS, **more: Any) -> Awaitable[RescaleOutcome]:
        return rescale(backend, client, namespace, RescalingRules(max_load=room / CPUS), **more)

    return make


@pytest.fixture
def a_pass(client: Redis, namespace: str) -> Pass:
    return passes(client, namespace)


async def test_two_at_once_come_one_after_the_other(a_pass: Pass, client: Redis, namespace: str) -> None:
    """The second decides by what the first has done, and has nothing to change."""
    with capture_logs() as said:

        async def has_company() -> None:
            while not any(line["event"] == "rescaling.lock_held" for line in said):  # noqa: ASYNC110 - a log has no event
                await asyncio.sleep(0.01)

        backend = Jobs(has("first", 6), has("second", 1), before_capacity=has_company)
        both = await asyncio.gather(*(a_pass(backend, 6) for _ in range(2)))
    assert [line["event"] for line in said].count("rescaling.lock_held") == 1
    assert sorted(len(done.plan.changes) for done in both) == [0, 2]
    assert backend.wanted == {"first": 3, "second": 3}
    assert await last_pass(client, namespace, PLACE) == max(both, key=lambda done: done.plan.at)


async def test_places_that_share_a_redis_have_a_pass_each(a_pass: Pass, client: Redis, namespace: str) -> None:
    """As two clusters that have a pool together: none waits for the other, and both are remembered."""

    class Elsewhere(Jobs):
        place = "elsewhere"

    there = Elsewhere(has("pool", 4))
    here = Jobs(has("pool", 6), before_capacity=lambda: a_pass(there, 2))
    with capture_logs() as said:
        await a_pass(here, 3)
    assert "rescaling.lock_held" not in [line["event"] for line in said]
    assert (here.wanted, there.wanted) == ({"pool": 3}, {"pool": 2})
    for place, size in ((PLACE, 3), ("elsewhere", 2)):
        done = await last_pass(client, namespace, place)
        assert done is not None
        assert targets(done) == {"pool": size}


async def test_a_job_that_ends_meanwhile_keeps_nobody(a_pass: Pass) -> None:
    """It is told, and all others are resized."""
    backend = Jobs(has("ends", 5), has("stays", 1), before_resize=lambda jobs: jobs.jobs.pop("ends", None))
    done = await a_pass(backend, 6)
    assert list(done.refused) == ["ends"]
    assert done.refused["ends"].startswith("no job or pool named 'ends'")
    assert backend.wanted == {"stays": 3}


async def test_what_a_job_keeps_that_cannot_shrink_is_not_for_others(
    a_pass: Pass, client: Redis, namespace: str
) -> None:
    """It is told, the others share the rest, and never more than there is for them; all of it in one pass."""
    backend = Jobs(has("hangs", 5), has("large", 4), has("small", 1))
    backend.hang = ("hangs",)
    assert targets(await a_pass(backend, 9, dry_run=True)) == {"hangs": 3, "large": 3, "small": 3}
    assert backend.wanted == {"hangs": 5, "large": 4, "small": 1}
    assert await last_pass(client, namespace, PLACE) is None, "a dry run is shown to nobody else"
    done = await a_pass(backend, 9)
    assert done.refused == {"hangs": "the supervisor of 'hangs' does not answer"}
    assert await last_pass(client, namespace, PLACE) == done, "with what failed"
    assert backend.wanted == targets(done) == {"hangs": 5, "large": 2, "small": 2}
    assert done.plan.targets[0].reason == "stays as it is: the supervisor of 'hangs' does not answer"


async def test_who_has_shrunk_for_what_is_not_to_be_any_more_gets_it_back(a_pass: Pass) -> None:
    """As for a job that needs the room of two, one of which can't shrink. The plan is what there is then."""

    def for_a_third(jobs: Sequence[Workload], *_: object, **__: object) -> Mapping[str, Target]:
        return {job.name: Target(instances=3 - len(jobs), reason="as said") for job in jobs}

    backend = Jobs(has("hangs", 2), has("shrinks", 2))
    backend.hang = ("hangs",)
    done = await a_pass(backend, policy=for_a_third)
    assert list(done.refused) == ["hangs"]
    assert backend.wanted == targets(done) == {"hangs": 2, "shrinks": 2}


async def test_that_a_job_cannot_grow_keeps_nobody(a_pass: Pass, client: Redis, namespace: str) -> None:
    """And a pass in which nothing could be done fails by what it met."""
    backend = Jobs(has("hangs", 1, Bounds(1, 4)), has("small", 1, Bounds(1, 4)))
    backend.hang = ("hangs", "small")
    with pytest.raises(BackendError, match=r"supervisor of '(hangs|small)' does not answer"):
        await a_pass(backend, 6)
    assert await last_pass(client, namespace, PLACE) is None
    backend.hang = ("hangs",)
    assert list((await a_pass(backend, 6)).refused) == ["hangs"]
    assert backend.wanted == {"hangs": 1, "small": 3}


async def test_what_is_left_undone_the_next_pass_completes(a_pass: Pass) -> None:
    """As decided before, without going back on what was done."""

    def is_lost_after_one(jobs: Jobs) -> None:
        if set(jobs.wanted.values()) != {5}:
            raise ClusterUnavailableError("https://cluster", "timed out")

    backend = Jobs(*(has(f"job-{number}", 5) for number in range(4)), before_resize=is_lost_after_one)
    meant = await a_pass(backend, 8, dry_run=True)
    with pytest.raises(ClusterUnavailableError):
        await a_pass(backend, 8)
    assert sorted(backend.wanted.values()) == [2, 5, 5, 5]
    healed = Jobs(*backend.jobs.values())
    assert len((await a_pass(healed, 8)).plan.changes) == 3
    assert healed.wanted == targets(meant)
    assert not (await a_pass(healed, 8)).plan.changes


async def test_instances_leave_nodes_that_are_about_to_go_before_a_pass_decides(a_pass: Pass) -> None:
    """The plan says so. A dry run moves nobody."""

    class Moving(Jobs):
        async def evacuate(self, jobs: Collection[str] | None = None) -> list[str]:
            assert jobs is None
            return ["pod a-0 has to leave"]

    backend = Moving(has("a", 3))
    assert (await a_pass(backend, dry_run=True)).plan.notes == ()
    assert (await a_pass(backend)).plan.notes == ("pod a-0 has to leave",)


async def test_a_pass_that_takes_too_long_is_given_up(a_pass: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was decided by may be so no more. Nothing is changed, and the next pass need not wait for it."""
    backend = Jobs(has("first", 6), before_capacity=asyncio.Event().wait)
    monkeypatch.setattr("edl_runtime.autoscale.rescale.PASS_LIMIT_S", 0.2)
    with pytest.raises(RescalingError, match=r"has not ended within 0\.2 s"):
        await a_pass(backend, 3)
    monkeypatch.undo()
    assert backend.wanted == {"first": 6}
    answers = Jobs(*backend.jobs.values())
    with capture_logs() as said:
        await a_pass(answers, 3)
    assert "rescaling.lock_held" not in [line["event"] for line in said]
    assert answers.wanted == {"first": 3}


async def test_without_redis_nothing_is_changed(own_redis: RedisServer, namespace: str) -> None:
    """A pass fails clearly while Redis is away; jobs stay as they are until one can be made."""
    backend = Jobs(has("first", 6))
    async with connect(own_redis.url) as client:
        own_redis.stop()
        with pytest.raises(RegistryUnavailableError):
            await passes(client, namespace)(backend, 3)
        assert backend.wanted == {"first": 6}
        own_redis.start()
        await passes(client, namespace)(backend, 3)
    assert backend.wanted == {"first": 3}


async def test_who_has_no_room_is_suspended_and_comes_back(a_pass: Pass) -> None:
    """Nobody runs with fewer than its minimum, and who was suspended starts again as soon as there is room."""
    backend = Jobs(has("first", 4, Bounds(4, 4)), has("second", 3, Bounds(3, 6)))
    await a_pass(backend, 5)
    assert backend.wanted == {"first": 0, "second": 5}
    await a_pass(backend, 10)
    assert backend.wanted == {"first": 4, "second": 6}


async def test_a_resized_job_has_the_reason_of_the_pass(a_pass: Pass) -> None:
    """So that a suspended one says why, wherever it is looked at."""
    backend = Jobs(has("first", 4, Bounds(4, 4)), has("second", 3, Bounds(3, 6)))
    done = await a_pass(backend, 5)
    reasons = {one.name: one.reason for one in done.plan.targets}
    assert reasons == {name: one.scaling.resized_for for name, one in backend.jobs.items() if one.scaling}
    assert "beside those that come first" in reasons["first"]


async def test_a_pass_tells_of_another_that_goes_by_other_rules(a_pass: Pass) -> None:
    """Two rescalers of one place, as a controller and a DAG, would undo what the other does."""
    backend = Jobs(has("job", 3))
    assert (await a_pass(backend, 4)).plan.notes == (await a_pass(backend, 4)).plan.notes == ()
    (note,) = (await a_pass(backend, 3)).plan.notes
    assert "went by other rules (max_load): if two rescalers act here, stop one" in note

    def own(*given: Any, **more: Any) -> Mapping[str, Target]:
        return decide(*given, **more)

    (note,) = (await a_pass(backend, 4, policy=own)).plan.notes
    assert "(policy, max_load)" in note


async def test_a_size_that_somebody_has_set_stays_for_some_minutes(a_pass: Pass) -> None:
    """As by `edl resize` or `kubectl scale`. What a pass has suspended does not wait for that."""

    def in_ten_minutes(*given: Any, now_s: float, pause_s: float) -> Mapping[str, Target]:
        return decide(*given, now_s=now_s + 600, pause_s=pause_s)

    backend = Jobs(has("first", 4, Bounds(4, 4)), has("second", 1, Bounds(1, 6)))
    await backend.resize("first", 0)
    await backend.resize("second", 2)
    for _ in range(2):
        await a_pass(backend, 10)
        assert backend.wanted == {"first": 0, "second": 2}
    await a_pass(backend, 10, policy=in_ten_minutes)
    assert backend.wanted == {"first": 4, "second": 6}
