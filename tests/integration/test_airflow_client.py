"""What tasks read from a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from edl_airflow.client import REDIS_CONNECTIONS, EdlClient, open_client
from edl_airflow.hooks.edl import EdlConnection
from edl_airflow.runtime.spec import LocalBackendRef, LogPosition
from edl_runtime.checkpoint import checkpoint_events
from edl_runtime.checkpoint.checkpoint_events import SavedCheckpoint
from edl_runtime.registry.directory import add_to_pool_list
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect

STREAM = "nightly/train"


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Any]:
    """A client of that Redis."""
    async with connect(redis_url) as client:
        yield client


@pytest.fixture
def connection(redis_url: str, namespace: str, tmp_path: Path) -> EdlConnection:
    return EdlConnection(redis_url=redis_url, namespace=namespace, place=LocalBackendRef(str(tmp_path)))


@pytest.fixture
async def site(connection: EdlConnection) -> AsyncIterator[EdlClient]:
    """What a connection leads to."""
    async with open_client(connection) as site:
        yield site


def _saved(step: int, job: str, at: float) -> SavedCheckpoint:
    return SavedCheckpoint(job=job, step=step, epoch=1, generation=1, url=f"/c/{step}", at=at)


async def test_a_checkpoint_is_found_among_those_of_other_jobs_and_nights(
    redis: Any, site: EdlClient, namespace: str
) -> None:
    """Of one job, and since it began, also where another job's or one that can't be read is saved later."""
    for step, job, at in ((1, "a", 100.0), (2, "a", 200.0), (3, "b", 300.0)):
        await checkpoint_events.publish(redis, namespace, STREAM, _saved(step, job, at))
    await redis.xadd(keys.checkpoints(namespace, STREAM), {"saved": '{"step": "far"}'})
    found = [await site.checkpoint(STREAM, *asked) for asked in (("a", 0.0), ("a", 200.0), ("a", 201.0), ("b", 201.0))]
    assert [one and one["step"] for one in found] == [2, 2, None, 3]
    assert await site.checkpoint("none", "a", 0.0) is None


async def test_a_pool_that_nobody_has_is_told_from_one_without_teachers(
    redis: Any, site: EdlClient, namespace: str
) -> None:
    """With the pools that there are; one that had members within a day is still known."""
    assert await site.other_pools("digits") == f"namespace {namespace!r} has no other pool"
    for name in ("mnist", "digit"):
        await add_to_pool_list(redis, namespace, name)
    assert await site.other_pools("digits") == f"namespace {namespace!r} has digit and 1 more"
    assert await site.other_pools("mnist") == ""


@pytest.mark.parametrize("entry", [{"saved": '{"step": "far"}'}, {"saved": "no JSON"}, {"another": "field"}])
async def test_what_can_not_be_read_of_a_stream_is_passed_by(
    redis: Any, site: EdlClient, namespace: str, entry: dict[str, str]
) -> None:
    """Whoever remembers how far he was meets it once."""
    await checkpoint_events.publish(redis, namespace, STREAM, _saved(1, "a", 1.0))
    bad_id = await redis.xadd(keys.checkpoints(namespace, STREAM), entry)
    assert await site.end_of_checkpoints(STREAM) == bad_id
    (_, first), (second_id, second) = await site.next_checkpoints(STREAM, "")
    assert first
    assert (first["step"], second_id, second) == (1, bad_id, None)
    assert await site.next_checkpoints(STREAM, second_id, block_ms=0) == []


async def test_tasks_of_one_triggerer_share_connections_but_not_with_one_that_waits(
    site: EdlClient, connection: EdlConnection
) -> None:
    """They stay open until the last has ended, and more tasks than connections wait for their turn."""
    async with open_client(connection) as other, open_client(connection, waits=True) as waiting:
        assert other.redis is site.redis
        assert waiting.redis is not site.redis
        await asyncio.gather(*(other.save_started_by(f"job-{n}", "mine") for n in range(3 * REDIS_CONNECTIONS)))
    assert await site.started_by(f"job-{2 * REDIS_CONNECTIONS}") == "mine"
    assert len(await site.redis.client_list()) < 2 * REDIS_CONNECTIONS


async def test_who_has_started_a_job_is_known_to_others(site: EdlClient) -> None:
    """The last of them."""
    assert await site.started_by("job") == ""
    for token in ("mine/1", "mine/2"):
        await site.save_started_by("job", token)
        assert await site.started_by("job") == token


@pytest.mark.parametrize("kept", ["no JSON", '{"lines": 5}', "[]"])
async def test_a_position_in_a_log_that_can_not_be_read_is_none(
    redis: Any, site: EdlClient, namespace: str, kept: str
) -> None:
    """All is shown again then, instead of nothing."""
    assert await site.log_position("job") is None
    position = LogPosition(created_at=1.0, lines={"0": 3}, instance=1, disruptions={1: 2})
    await site.save_log_position("job", position)
    assert await site.log_position("job") == position
    await redis.set(keys.log_position(namespace, "job"), kept)
    assert await site.log_position("job") is None
