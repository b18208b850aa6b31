"""What `edl monitor` remembers in Redis."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from support.autoscale.jobs import past

from edl_runtime.autoscale import history
from edl_runtime.autoscale.history import HistoryPoint
from edl_runtime.autoscale.planner import MeasuredTraffic, RescalingRules
from edl_runtime.autoscale.rescale import rescale
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.store import keys
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect

PLACE = "/jobs"


async def remembered_before(client: Redis, namespace: str, point: HistoryPoint, ago_s: float) -> None:
    """Let a point stand in the stream as one that was recorded so long ago."""
    seconds, micros = await client.time()
    at_ms = int((seconds + micros / 1e6 - ago_s) * 1000)
    told = msgspec.json.encode(msgspec.structs.replace(point, at=0.0)).decode()
    await client.xadd(keys.history(namespace, PLACE), {"point": told}, id=f"{at_ms}-0")


async def test_points_come_back_in_order_with_their_times(client: Redis, namespace: str) -> None:
    """From a time on, and the one that held then."""
    for ago_s, running in ((2000.0, 1), (500.0, 2), (300.0, 3), (100.0, 4)):
        await remembered_before(client, namespace, past(0.0, a=running), ago_s)
    assert await history.record_point(client, namespace, PLACE, past(7.0, a=5))
    now = time.time()
    found = await history.read_points(client, namespace, PLACE, since=now - 400)
    assert [point.jobs["a"].running for point in found] == [2, 3, 4, 5]
    assert [now - point.at for point in found] == pytest.approx([500, 300, 100, 0], abs=90)
    assert len(await history.read_points(client, namespace, PLACE, since=now - 1000)) == 4, (
        "what is too old held no longer"
    )


@pytest.mark.parametrize(
    ("ago_s", "before", "added"),
    [
        (4.0, past(0.0, a=1), True),
        (4.0, past(0.0, a=2), False),
        (30.0, past(0.0, a=2), False),
        (61.0, past(0.0, a=2), True),
        (-100.0, past(0.0, a=2), False),
        (-100.0, past(0.0, a=1), True),
    ],
)
async def test_a_point_is_added_when_there_is_something_new(
    client: Redis, namespace: str, ago_s: float, before: HistoryPoint, *, added: bool
) -> None:
    """Not within a minute of one that says the same."""
    await remembered_before(client, namespace, before, ago_s)
    assert await history.record_point(client, namespace, PLACE, past(0.0, a=2)) is added
    assert await client.xlen(keys.history(namespace, PLACE)) == 1 + added


async def test_a_measurement_of_equal_traffic_is_nothing_new(
    client: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass measures anew; a hundred that find the same are one point."""
    monkeypatch.setattr(history, "TWO_WITHIN_MS", 0)
    seen = past(0.0, a=2)
    for number in range(100):
        traffic = MeasuredTraffic(resource="gpu", needed=3.0, at=1000.0 + 30 * number)
        await history.record_point(client, namespace, PLACE, msgspec.structs.replace(seen, traffic=traffic))
    [found] = await history.read_points(client, namespace, PLACE, since=0.0)
    assert found.traffic == MeasuredTraffic(resource="gpu", needed=3.0, at=found.at)


async def test_of_many_at_once_the_first_and_the_last_stay(
    client: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks writes, nothing is doubled, and what holds after a burst is known."""
    monkeypatch.setattr(history, "TWO_WITHIN_MS", 600_000)
    points = [past(0.0, a=number) for number in range(8)]
    same = await asyncio.gather(*(history.record_point(client, namespace, PLACE, points[0]) for _ in range(8)))
    assert sum(same) == 1
    for point in points[1:]:
        assert await history.record_point(client, namespace, PLACE, point)
    found = await history.read_points(client, namespace, PLACE, since=0.0)
    assert [point.jobs for point in found] == [points[0].jobs, points[-1].jobs]
    async with client.pipeline(transaction=False) as later:
        later.delete(keys.history(namespace, PLACE))
        for at_ms, point in ((1000, points[0]), (2000, points[1])):
            later.xadd(keys.history(namespace, PLACE), {"point": msgspec.json.encode(point)}, id=f"{at_ms}-0")
        await later.execute()
    assert await history.record_point(client, namespace, PLACE, points[2])
    assert [point.at for point in await history.read_points(client, namespace, PLACE, since=1.0)][:2] == [1.0, 2.0]


async def test_the_past_is_bounded(client: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In points, or where these are large, in bytes; and it goes when nobody looks for a week."""
    key = keys.history(namespace, PLACE)
    monkeypatch.setattr(history, "MOST_POINTS", 1_500)
    monkeypatch.setattr(history, "MOST_BYTES", 1 << 20)
    for seen, most in ((past(0.0, a=1), 1_500), (past(0.0, window="w" * 1024), 1_000)):
        await client.delete(key)
        async with client.pipeline(transaction=False) as many:
            for number in range(2_000):
                many.xadd(key, {"point": "{}"}, id=f"{number + 1}-0")
            await many.execute()
        assert await history.record_point(client, namespace, PLACE, seen)
        assert most - 100 <= await client.xlen(key) <= most + 200
        assert history.KEPT_S - 600 < await client.ttl(key) <= history.KEPT_S


async def test_a_rescaling_remembers_what_it_saw(work_dir: Path, client: Redis, namespace: str) -> None:
    """With what training may use by its plan; a dry run is no rescaling."""
    rules = RescalingRules(max_load=0.5)
    await rescale(LocalBackend(work_dir), client, namespace, rules, dry_run=True)
    assert await history.read_points(client, namespace, str(work_dir), since=0.0) == []
    await rescale(LocalBackend(work_dir), client, namespace, rules)
    [found] = await history.read_points(client, namespace, str(work_dir), since=0.0)
    assert found.jobs == {}
    assert found.use["cpu"].allowed == found.use["cpu"].total / 2


async def test_what_another_version_wrote_is_left_out(client: Redis, namespace: str) -> None:
    """It costs that point, and not the picture."""
    await client.xadd(keys.history(namespace, PLACE), {"point": '{"jobs": 3}'})
    await client.xadd(keys.history(namespace, PLACE), {"other": "x"})
    assert await history.read_points(client, namespace, PLACE, since=0.0) == []


async def test_without_redis_the_error_says_so() -> None:
    """As with all that is asked of it."""
    async with connect("redis://:secret@127.0.0.1:1/0") as client:
        with pytest.raises(RegistryUnavailableError, match=r"127.0.0.1:1"):
            await history.record_point(client, "team", PLACE, past(0.0))


@pytest.mark.parametrize("kept", ['{"at": "noon"}', "what is this"])
async def test_a_plan_that_can_not_be_read_is_none(client: Redis, namespace: str, kept: str) -> None:
    """As one that another version has left; who shows the last plan goes on."""
    await client.set(keys.plan(namespace, PLACE), kept)
    assert await history.last_pass(client, namespace, PLACE) is None
