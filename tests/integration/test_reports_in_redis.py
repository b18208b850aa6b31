"""What members, students and jobs report, in a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.autoscale.jobs import running_job

from edl_runtime import progress
from edl_runtime.checkpoint import checkpoint_events
from edl_runtime.checkpoint.checkpoint_events import SavedCheckpoint
from edl_runtime.monitor.reports import read_reports
from edl_runtime.pool_reports import PoolDemand, StudentReport, TeacherReport
from edl_runtime.progress import CurvePoint, Progress
from edl_runtime.registry import lease as lease_module
from edl_runtime.registry import pools as pools_module
from edl_runtime.registry.lease import Lease, MakeReport, hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.registry.pools import Quarantine, get_pool, list_pools, read_demands
from edl_runtime.store import keys
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.keys import Service
from edl_runtime.store.redis_client import connect

if TYPE_CHECKING:
    from redis.asyncio import Redis

STALE_AFTER_S = 600.0
BUSY = TeacherReport(busy=0.75, over_s=10.0)
WAITING = StudentReport(waiting=0.5, asked=1.5, samples_per_s=80.0, teachers=2, want=3, over_s=10.0)


def checkpoint(step: int) -> SavedCheckpoint:
    return SavedCheckpoint(
        job="job", step=step, epoch=1, generation=2, url=f"/c/{step}", at=1.5, metrics={"accuracy": 0.9}
    )


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda client: progress.read_progress(client, "n", "job"), id="progress"),
        pytest.param(
            lambda client: progress.publish_progress(client, "n", "job", Progress(step=1, updated_at=1.0)), id="report"
        ),
        pytest.param(lambda client: progress.read_curve(client, "n", "job"), id="curve"),
        pytest.param(lambda client: read_demands(client, "n", ["p"]), id="demands"),
        pytest.param(lambda client: checkpoint_events.newest(client, "n", "s"), id="the newest checkpoint"),
        pytest.param(lambda client: checkpoint_events.end(client, "n", "s"), id="the end of the checkpoints"),
        pytest.param(lambda client: checkpoint_events.after(client, "n", "s"), id="later checkpoints"),
        pytest.param(
            lambda client: checkpoint_events.publish(client, "n", "s", checkpoint(1)), id="to publish a checkpoint"
        ),
    ],
)
async def test_without_redis_it_is_an_error_of_ours(ask: Callable[[Redis], Awaitable[object]]) -> None:
    """It names the Redis that is away; what that means the caller decides."""
    async with connect("redis://127.0.0.1:1/0") as client:
        with pytest.raises(RegistryUnavailableError, match=r"127\.0\.0\.1:1"):
            await ask(client)


@pytest.fixture(autouse=True)
def _told_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for the renewal that brings a report, and no lease runs out where nobody has CPU."""
    monkeypatch.setattr(lease_module, "RENEW_EVERY_S", 0.02)
    monkeypatch.setattr(pools_module, "STALE_AFTER_S", STALE_AFTER_S)


def hold(
    client: Redis, service: Service, member: Member, make_report: MakeReport = lambda: None
) -> AbstractAsyncContextManager[Lease]:
    return hold_lease(client, service, member, ttl_s=60, make_report=make_report)


async def said(client: Redis, namespace: str, *pools: str) -> dict[str, PoolDemand]:
    """Return what is reported, whenever somebody came or went."""
    found = await read_demands(client, namespace, pools)
    return {pool: msgspec.structs.replace(demand, settled_s=math.inf) for pool, demand in found.items()}


async def until(client: Redis, namespace: str, wanted: PoolDemand) -> None:
    async with asyncio.timeout(100):
        while (await said(client, namespace, "p"))["p"] != wanted:  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.01)


async def test_reports_come_with_renewals_and_go_with_the_lease(client: Redis, namespace: str) -> None:
    """Those of all pools at once; a member that says nothing is listed, and so is a pool that nobody is in."""
    teachers, students = Service(namespace, "p"), Service(namespace, "p", "students")
    told = PoolDemand(teachers={"t0": BUSY, "t1": None}, students={"s0": WAITING})
    async with (
        hold(client, teachers, Member(id="t0", address="h:1"), make_report=lambda: BUSY),
        hold(client, teachers, Member(id="t1", address="h:2")),
        hold(client, students, Member(id="s0", address="h:3"), make_report=lambda: WAITING),
        hold(client, Service(namespace, "q"), Member(id="t2", address="h:4")),
    ):
        await until(client, namespace, told)
        assert await said(client, namespace, "p", "none", "q") == {
            "p": told,
            "none": PoolDemand(),
            "q": PoolDemand(teachers={"t2": None}),
        }
    assert await said(client, namespace, "p") == {"p": PoolDemand()}
    assert await client.exists(keys.service_key(teachers, "reports"), keys.service_key(students, "reports")) == 0


async def test_a_report_ends_with_its_lease(client: Redis, namespace: str) -> None:
    """It counts no longer than the lease, and one who registers anew has said nothing yet."""
    service = Service(namespace, "p")
    lease = hold(client, service, Member(id="t0", address="h:1"), make_report=lambda: BUSY)
    async with lease:
        await until(client, namespace, PoolDemand(teachers={"t0": BUSY}))
        async with hold(client, service, Member(id="t0", address="h:1")):
            assert await said(client, namespace, "p") == {"p": PoolDemand(teachers={"t0": None})}


async def test_an_old_or_unreadable_report_is_none(client: Redis, namespace: str) -> None:
    """By Redis's clock; what something else wrote hides nobody's."""
    service = Service(namespace, "p")
    seconds, micros = await client.time()
    now_s = seconds + micros / 1e6
    async with hold(client, service, Member(id="t0", address="h:1")):
        await client.hset(
            keys.service_key(service, "reports"), "t0", f'{{"at":{now_s - STALE_AFTER_S - 1},"busy":0.5,"over_s":10}}'
        )
        assert await said(client, namespace, "p") == {"p": PoolDemand(teachers={"t0": None})}
        await client.hset(keys.service_key(service, "reports"), "t0", f'{{"at":{now_s},"busy":"much"}}')
        assert await said(client, namespace, "p") == {"p": PoolDemand(teachers={"t0": None})}
        await client.hset(
            keys.service_key(service, "reports"), "t0", f'{{"at":{now_s},"busy":0.5,"over_s":10,"new":1}}'
        )
        found = (await read_demands(client, namespace, ["p"]))["p"]
        assert found.busy == 0.5


async def test_the_last_join_or_leave_is_known(client: Redis, namespace: str) -> None:
    """Of either role, by the clock of their leases; of a pool that there never was, nobody has."""
    service = Service(namespace, "p")
    seconds, _ = await client.time()
    await client.hset(keys.service_key(service, "clock"), "changed", str(1000 * (seconds - 3600)))
    async with hold(client, Service(namespace, "p", "students"), Member(id="s0", address="h:2")):
        assert (await read_demands(client, namespace, ["p"]))["p"].settled_s < 3600
        await client.delete(keys.service_key(Service(namespace, "p", "students"), "clock"))
        assert (await read_demands(client, namespace, ["p"]))["p"].settled_s >= 3600
        assert (await read_demands(client, namespace, ["q"]))["q"].settled_s == math.inf
        assert await read_demands(client, namespace, []) == {}


async def test_the_last_report_is_read_back_for_an_hour(client: Redis, namespace: str) -> None:
    """What a student published is what Airflow reads; a job without a report has none."""
    report = Progress(step=7, updated_at=1.5, loss=0.25, answered={"h:1": 3})
    assert await progress.read_progress(client, namespace, "job") is None
    await progress.publish_progress(client, namespace, "job", Progress(step=6, updated_at=1.0))
    await progress.publish_progress(client, namespace, "job", report)
    assert await progress.read_progress(client, namespace, "job") == report
    assert await progress.read_progress(client, namespace, "other") is None
    assert 3500 < await client.ttl(keys.progress(namespace, "job")) <= 3600


async def test_a_curve_has_a_point_for_each_step(client: Redis, namespace: str) -> None:
    """A repeated step replaces its point, and what has trained nothing yet has none; it is kept for a day."""
    assert await progress.read_curve(client, namespace, "job") == []
    for step, loss in ((0, None), (1, 0.9), (2, 0.8), (2, 0.7)):
        report = Progress(step=step, updated_at=float(step), epoch=1, loss=loss, metrics={"accuracy": step / 10})
        await progress.publish_progress(client, namespace, "job", report)
    assert await progress.read_curve(client, namespace, "job") == [
        CurvePoint(step=1, at=1.0, epoch=1, loss=0.9, metrics={"accuracy": 0.1}),
        CurvePoint(step=2, at=2.0, epoch=1, loss=0.7, metrics={"accuracy": 0.2}),
    ]
    assert 86_000 < await client.ttl(keys.progress_curve(namespace, "job")) <= 86_400


async def test_a_curve_goes_back_with_the_training(client: Redis, namespace: str) -> None:
    """From a checkpoint it continues at its step; one that begins anew has a new curve."""
    for step in (10, 20, 30, 15, 25):
        await progress.publish_progress(client, namespace, "job", Progress(step=step, updated_at=1.0))
    assert [point.step for point in await progress.read_curve(client, namespace, "job")] == [10, 15, 25]
    await progress.publish_progress(client, namespace, "job", Progress(step=0, updated_at=2.0))
    assert await progress.read_curve(client, namespace, "job") == []


async def test_a_report_of_an_earlier_generation_is_dropped(client: Redis, namespace: str) -> None:
    """An agent that was suspended takes no step from the curve; a new run may begin with any generation."""
    late = Progress(step=5, updated_at=1.0, generation=1, run="first")
    newest = Progress(step=9, updated_at=2.0, generation=2, run="first")
    for report in (newest, late):
        await progress.publish_progress(client, namespace, "job", report)
    assert await progress.read_progress(client, namespace, "job") == newest
    assert [point.step for point in await progress.read_curve(client, namespace, "job")] == [9]
    again = Progress(step=1, updated_at=3.0, generation=1, run="second")
    await progress.publish_progress(client, namespace, "job", again)
    assert await progress.read_progress(client, namespace, "job") == again


async def test_a_long_curve_is_thinned_over_its_whole_length(client: Redis, namespace: str) -> None:
    """However many reports, it has a limited number of points: the first, the last, and no wide gap between them."""
    first, last, every = 50_000, 90_000, 10
    for step in range(first, last + 1, every):
        await progress.publish_progress(client, namespace, "job", Progress(step=step, updated_at=1.0))
    steps = [point.step for point in await progress.read_curve(client, namespace, "job")]
    assert 250 <= len(steps) <= progress.MOST_POINTS
    assert (steps[0], steps[-1]) == (first, last)
    assert max(later - step for step, later in pairwise(steps)) <= 4 * (last - first) / progress.MOST_POINTS
    few = [point.step for point in await progress.read_curve(client, namespace, "job", most=7)]
    assert len(few) <= 7
    assert few[-1] == last


@pytest.mark.parametrize("kind", ["lpush", "sadd"])
async def test_a_key_of_another_type_is_replaced(client: Redis, namespace: str, kind: str) -> None:
    """As of another version: training must not end for it."""
    for key in (keys.progress(namespace, "job"), keys.progress_curve(namespace, "job")):
        await getattr(client, kind)(key, "nonsense")
    await progress.publish_progress(client, namespace, "job", Progress(step=3, updated_at=1.0))
    assert [point.step for point in await progress.read_curve(client, namespace, "job")] == [3]


async def test_progress_of_readers_is_added_to_that_of_the_agents(client: Redis, namespace: str) -> None:
    """Of the same run alone, from whichever comes first; counts of an instance that has left stay."""
    first = Progress(step=9, updated_at=100.0, answered={"a": 2, "b": 1}, teachers=2, waiting=0.1, limit="student")
    second = Progress(step=5, updated_at=101.0, answered={"a": 4}, teachers=1, waiting=0.5, limit="teachers", queued=3)
    left = Progress(step=5, updated_at=50.0, answered={"c": 1}, teachers=9, cached=7, waiting=0.9, limit="source")
    for instance, reader in enumerate((first, second, left)):
        await progress.publish_reader_progress(client, namespace, "job", reader, run="now", instance=instance)
    await progress.publish_reader_progress(client, namespace, "job", first, run="before", instance=0)
    assert await progress.read_progress(client, namespace, "job") is None
    await progress.publish_progress(client, namespace, "job", Progress(step=7, updated_at=102.0, loss=0.5, run="now"))
    found = await progress.read_progress(client, namespace, "job")
    assert found == Progress(
        step=7,
        updated_at=102.0,
        loss=0.5,
        run="now",
        answered={"a": 6, "b": 1, "c": 1},
        teachers=2,
        cached=7,
        waiting=0.5,
        limit="teachers",
        queued=3,
    )
    await progress.publish_progress(client, namespace, "job", Progress(step=8, updated_at=103.0, run="next"))
    found = await progress.read_progress(client, namespace, "job")
    assert found
    assert found.answered == {}
    assert 3500 < await client.ttl(keys.readers_progress(namespace, "job", "now")) <= 3600


async def test_a_teachers_most_frequent_quarantine_is_shown(client: Redis, namespace: str) -> None:
    """With the number of students that have it in quarantine; only students of the pool count."""
    reasons = [{"a:1": "silent"}, {"a:1": "garbage", "b:1": "wrong dtype"}, {"a:1": "garbage"}]
    reports = {f"s{number}": StudentReport(quarantined=its) for number, its in enumerate(reasons)}
    async with contextlib.AsyncExitStack() as stack:
        for address in ("a:1", "b:1", "c:1"):
            await stack.enter_async_context(hold(client, Service(namespace, "p"), Member(id=address, address=address)))
        for student in (*reports, "silent"):
            member = Member(id=student, address="h:1")
            service = Service(namespace, "p", "students")
            await stack.enter_async_context(hold(client, service, member, partial(reports.get, student)))
        async with asyncio.timeout(100):
            while list((await said(client, namespace, "p"))["p"].students.values()).count(None) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        teachers = (await get_pool(client, namespace, "p")).teachers
    assert {teacher.address: teacher.quarantine for teacher in teachers} == {
        "a:1": Quarantine("garbage", 3),
        "b:1": Quarantine("wrong dtype", 1),
        "c:1": None,
    }


async def test_checkpoints_are_read_once_after_a_position(client: Redis, namespace: str) -> None:
    """Oldest first, all of it, and the newest by itself."""
    assert await checkpoint_events.newest(client, namespace, "s") is None
    assert await checkpoint_events.end(client, namespace, "s") == checkpoint_events.START
    for step in (1, 2):
        await checkpoint_events.publish(client, namespace, "s", checkpoint(step))
    found = await checkpoint_events.after(client, namespace, "s")
    assert [one for _, one in found] == [checkpoint(1), checkpoint(2)]
    assert await checkpoint_events.newest(client, namespace, "s") == checkpoint(2)
    assert await checkpoint_events.after(client, namespace, "s", found[0][0]) == found[1:]
    assert await checkpoint_events.end(client, namespace, "s") == found[1][0]
    assert await checkpoint_events.after(client, namespace, "s", found[1][0], block_ms=0) == []
    assert await checkpoint_events.after(client, namespace, "other", block_ms=0) == []


async def test_a_new_checkpoint_is_seen_at_once(client: Redis, namespace: str) -> None:
    """Whoever waits for it is woken; a wait is never longer than the client's patience."""
    last = await checkpoint_events.end(client, namespace, "s")
    assert await checkpoint_events.after(client, namespace, "s", last, block_ms=60_000) == []
    waiting = asyncio.ensure_future(checkpoint_events.after(client, namespace, "s", last))
    await asyncio.sleep(0)
    await checkpoint_events.publish(client, namespace, "s", checkpoint(1))
    assert [one for _, one in await waiting] == [checkpoint(1)]


async def test_a_stream_outlives_its_job_and_does_not_grow_for_ever(
    client: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept for 30 days from its last checkpoint, and of many the last ones."""
    monkeypatch.setattr(checkpoint_events, "MAX_KEPT", 10)
    for step in range(300):
        await checkpoint_events.publish(client, namespace, "s", checkpoint(step))
    assert await client.xlen(keys.checkpoints(namespace, "s")) < 150
    assert await client.ttl(keys.checkpoints(namespace, "s")) > 29 * 24 * 3600
    assert await checkpoint_events.newest(client, namespace, "s") == checkpoint(299)


async def test_many_jobs_and_pools_are_read_in_as_many_round_trips_as_one(
    client: Redis, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that hundreds of jobs cost no more waiting for Redis."""
    jobs = [running_job(f"job-{number}", 2, created_at=0.0) for number in range(9)]
    async with contextlib.AsyncExitStack() as stack:
        reader = await stack.enter_async_context(connect(redis_url))
        trips, connection = 0, reader.connection_pool.get_connection

        async def counted(*args: str) -> object:
            nonlocal trips
            trips += 1
            return await connection(*args)

        monkeypatch.setattr(reader.connection_pool, "get_connection", counted)

        async def count(read: Awaitable[object]) -> int:
            before = trips
            await read
            return trips - before

        for job in jobs:
            await progress.publish_progress(client, namespace, job.name, Progress(step=3, updated_at=1.0, run="run"))
            await client.hset(keys.group_state(namespace, job.name), mapping={"run": "run", "wall": "1000"})
            pool = Service(namespace, f"pool-of-{job.name}")
            await stack.enter_async_context(hold(client, pool, Member(id="t", address="h:1")))
        found = await read_reports(reader, namespace, jobs)
        assert {job.name for job in jobs if (report := found[job.name]).progress and report.group} == found.keys()
        assert len(await list_pools(reader, namespace)) == len(jobs)
        alone = await count(read_reports(reader, namespace, jobs[:1]))
        assert await count(read_reports(reader, namespace, jobs)) == alone == 3
        assert await count(list_pools(reader, namespace)) == 3
