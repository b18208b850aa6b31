"""What another job, another version or a stranger has left in Redis, and is no JSON of ours."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from structlog.testing import capture_logs
from support.registry.followers import POOL, registered, student, wait_for_log

from edl_runtime import progress
from edl_runtime.autoscale import history
from edl_runtime.autoscale.history import HistoryPoint, RescaleOutcome, last_pass, read_points
from edl_runtime.autoscale.planner import RescalingPlan
from edl_runtime.autoscale.traffic.sources.learner import _cached_profile
from edl_runtime.backends.interface import JobStatus, Origin
from edl_runtime.checkpoint import checkpoint_events
from edl_runtime.elastic.rendezvous import redis_store
from edl_runtime.elastic.rendezvous.group_status import group_status
from edl_runtime.orphans import Orphan, read_notes
from edl_runtime.progress import Progress
from edl_runtime.registry import directory, lease
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.registry.pools import read_demands
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError
from edl_runtime.store.keys import Role, Service

if TYPE_CHECKING:
    from redis.asyncio import Redis

NONSENSE = ["", "{", "null", '{"of another version":' + "[" * 100_000]

Reads = Callable[["Redis", str, str], Awaitable[Any]]


async def report(client: Redis, namespace: str, nonsense: str) -> Any:
    await client.set(keys.progress(namespace, "job"), nonsense)
    return await progress.read_progress(client, namespace, "job") or []


async def curve(client: Redis, namespace: str, nonsense: str) -> Any:
    await client.zadd(keys.progress_curve(namespace, "job"), {nonsense: 1})
    return await progress.read_curve(client, namespace, "job")


async def reader_s_report(client: Redis, namespace: str, nonsense: str) -> Any:
    said = Progress(step=1, updated_at=1.0, run="run")
    await client.set(keys.progress(namespace, "job"), msgspec.json.encode(said))
    await client.hset(keys.readers_progress(namespace, "job", "run"), "0", nonsense)
    return [] if await progress.read_progress(client, namespace, "job") == said else ["another report"]


async def demanded(client: Redis, namespace: str, nonsense: str) -> Any:
    service = Service(namespace, "p")
    async with hold_lease(client, service, Member(id="t0", address="h:1"), ttl_s=600.0):
        await client.hset(keys.service_key(service, "reports"), "t0", nonsense)
        return [one for one in (await read_demands(client, namespace, ["p"]))["p"].teachers.values() if one]


async def member(client: Redis, namespace: str, nonsense: str) -> Any:
    service = Service(namespace, "p")
    async with hold_lease(client, service, Member(id="t0", address="h:1"), ttl_s=600.0):
        await client.hset(keys.service_key(service, "records"), "t0", nonsense)
        return await Directory(client, namespace).members("p", "teachers")


async def checkpoint(client: Redis, namespace: str, nonsense: str) -> Any:
    await client.xadd(keys.checkpoints(namespace, "stream"), {"saved": nonsense})
    return [one for _, one in await checkpoint_events.after(client, namespace, "stream", block_ms=0) if one]


async def event(client: Redis, namespace: str, nonsense: str) -> Any:
    await client.xadd(keys.group_events(namespace, "job"), {"event": nonsense})
    await client.xadd(keys.group_events(namespace, "job"), {"of another version": nonsense})
    return await redis_store.read_events(client, namespace, "job")


async def profile(client: Redis, namespace: str, nonsense: str) -> Any:
    key = keys.traffic_profile(namespace, "digest")
    await client.set(key, nonsense)
    return await _cached_profile(client, key) or []


@pytest.mark.parametrize("nonsense", NONSENSE, ids=lambda text: text[:30])
@pytest.mark.parametrize("found", [report, curve, reader_s_report, demanded, member, checkpoint, event, profile])
async def test_an_unreadable_record_counts_as_none(client: Redis, namespace: str, found: Reads, nonsense: str) -> None:
    """And whoever reads it goes on."""
    assert not await found(client, namespace, nonsense)


def without_end(record: object) -> str:
    """Return a record that is whole, after more than is read of anything."""
    return " " * (5 << 20) + msgspec.json.encode(record).decode()


async def test_members_and_reports_without_end_take_nothing_from_others(client: Redis, namespace: str) -> None:
    """A pool's readers are students, the page in Airflow, and whoever else looks at all pools."""
    service = Service(namespace, "p")
    async with (
        hold_lease(client, service, Member(id="t0", address="h:1"), ttl_s=600.0),
        hold_lease(client, service, Member(id="t1", address="h:2"), ttl_s=600.0),
    ):
        records, reports = (keys.service_key(service, part) for part in ("records", "reports"))
        (now_s, _) = await client.time()
        said = {"at": now_s, "busy": 0.5, "over_s": 10.0}
        await client.hset(records, "t0", without_end(Member(id="t0", address="h:1")))
        await client.hset(reports, "t0", without_end(said))
        await client.hset(reports, "t1", msgspec.json.encode(said))
        assert [one.id for one in await Directory(client, namespace).members("p")] == ["t1"]
        reported = (await read_demands(client, namespace, ["p"]))["p"].teachers
        assert [reported["t0"], reported["t1"] and reported["t1"].busy] == [None, 0.5]
        many = {f"m{number}": msgspec.json.encode(Member(id=f"m{number}", address="h:3")) for number in range(10_100)}
        await client.hset(records, mapping=many)
        await client.zadd(keys.service_key(service, "leases"), dict.fromkeys(many, 1e15))
        assert len(await Directory(client, namespace).members("p")) == 10_000
        assert len((await read_demands(client, namespace, ["p"]))["p"].teachers) == 10_000
        await client.delete(keys.service_key(service, "leases"))


async def test_a_job_s_records_without_end_count_as_none(
    client: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of one reader, a field of its group's state, and the note of an orphan; all else is read."""
    reader = Progress(step=1, updated_at=1.0, run="run", cached=3)
    of_readers = {"0": without_end(reader), "1": msgspec.json.encode(reader)}
    await client.set(keys.progress(namespace, "job"), msgspec.json.encode(reader))
    await client.hset(keys.readers_progress(namespace, "job", "run"), mapping=of_readers)
    found = await progress.read_progress(client, namespace, "job")
    assert found
    assert found.cached == 3
    await client.hset(keys.readers_progress(namespace, "job", "run"), mapping=dict.fromkeys(range(3), of_readers["1"]))
    monkeypatch.setattr(progress, "MOST_READERS", 2)
    found = await progress.read_progress(client, namespace, "job")
    assert found
    assert found.cached == 6
    state = {"run": "r", "wall": "1", "current": "7", "waits": without_end(""), "stop": "deadline"}
    await client.hset(keys.group_state(namespace, "job"), mapping=state)
    status = await group_status(client, namespace, "job")
    assert status
    assert (status.waits, status.generation, status.stop) == ("", 7, "deadline")
    await client.set(keys.orphan(namespace, "job"), without_end(Orphan(token="", why="", since=1.0)))
    origin = Origin(airflow="a", dag_id="d", run_id="r", task_id="t")
    job = JobStatus(
        name="job", kind="trainer", phase="running", token="", digest="", wanted=1, origin=origin, created_at=1.0
    )
    assert await read_notes(client, namespace, [job]) == {}


async def test_what_a_place_has_without_end_counts_as_none(
    client: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A point of its past, and its last pass."""
    monkeypatch.setattr(history, "MOST_BYTES", 4 << 20)
    point, key = HistoryPoint(jobs={}, use={}), keys.history(namespace, "place")
    for second, content in enumerate([msgspec.json.encode(point), without_end(point), msgspec.json.encode(point)], 1):
        await client.xadd(key, {"point": content}, id=f"{second}000-0")
    assert [one.at for one in await read_points(client, namespace, "place", since=0.0)] == [1.0, 3.0]
    assert [one.at for one in await read_points(client, namespace, "place", since=2.5)] == [3.0]
    monkeypatch.setattr(history, "MOST_POINTS", 1)
    assert [one.at for one in await read_points(client, namespace, "place", since=0.0)] == [3.0]
    done = RescaleOutcome(plan=RescalingPlan(at=1.0, capacity={}))
    await client.set(keys.plan(namespace, "place"), without_end(done))
    assert await last_pass(client, namespace, "place") is None


async def test_a_key_of_another_type_is_named(client: Redis, namespace: str) -> None:
    """By those of the script that meets it, whether it is asked alone or with others."""
    service = Service(namespace, "p")
    async with hold_lease(client, service, Member(id="t0", address="h:1"), ttl_s=600.0):
        await client.set(keys.service_key(service, "records"), "?")
        await client.set(keys.service_key(service, "reports"), "?")
        for look in (Directory(client, namespace).members("p"), read_demands(client, namespace, ["p"])):
            with pytest.raises(MalformedRecordError, match="WRONGTYPE") as caught:
                await look
            assert caught.value.key.startswith(f"edl:{{{namespace}/p}}:")
        await client.delete(keys.service_key(service, "records"), keys.service_key(service, "reports"))


COMMON: list[str] = ["leases", "records", "events", "clock", "drained"]


@pytest.mark.parametrize(
    ("role", "part"),
    [*itertools.product(keys.ROLES, COMMON), ("teachers", "contract"), ("students", "reports")],
)
async def test_teachers_and_students_outlive_a_key_of_another_type(
    client: Redis, settings: RuntimeSettings, role: Role, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they do an outage: they name the keys once, use whom they know, and go on when it is deleted."""
    for module, name in ((lease, "RENEW_EVERY_S"), (directory, "POLL_EVERY_S"), (directory, "RETRY_EVERY_S")):
        monkeypatch.setattr(module, name, 0.02)
    monkeypatch.setattr(directory, "SETTLE_S", 3600.0)  # as long as its teacher takes to come back
    key = keys.service_key(Service(settings.namespace, POOL, role), part)
    with capture_logs() as logs:
        async with registered(settings, "a:1"), student(settings) as one:
            await one.wait_for(lambda teachers: teachers == ("a:1",))
            async with client.pipeline() as both:
                await both.delete(key).sadd(key, "?").execute()
            await wait_for_log(logs, "registry.unavailable")
            await asyncio.sleep(0.1)  # several more tries
            await client.delete(key)
            await wait_for_log(logs, "registry.recovered")
            async with registered(settings, "b:1"):
                await one.wait_for(lambda teachers: set(teachers) == {"a:1", "b:1"})
            assert () not in [teachers for _, teachers in one.updates]
    troubles = [entry for entry in logs if entry["event"] in ("registry.unavailable", "lease.rejected")]
    for entry in troubles:
        assert entry["event"] == "registry.unavailable"
        assert "WRONGTYPE" in entry["cause"]
        assert entry["address"].startswith(f"edl:{{{settings.namespace}/{POOL}}}:{role}:")
    assert len(troubles) == len({str(entry) for entry in troubles})
