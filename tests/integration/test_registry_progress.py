"""Progress reports in a real Redis."""

from __future__ import annotations

import pytest

from edl_runtime import progress
from edl_runtime.errors import RegistryUnavailableError
from edl_runtime.progress import Progress
from edl_runtime.store import keys
from edl_runtime.store.client import connect


async def test_the_last_report_is_read_back_for_an_hour(redis_url: str, namespace: str) -> None:
    """What a student published is what Airflow reads; a job without a report has none."""
    report = Progress(step=7, updated_at=1.5, loss=0.25, answered={"h:1": 3})
    async with connect(redis_url) as client:
        assert await progress.read(client, namespace, "job") is None
        await progress.publish(client, namespace, "job", Progress(step=6, updated_at=1.0))
        await progress.publish(client, namespace, "job", report)
        assert await progress.read(client, namespace, "job") == report
        assert await progress.read(client, namespace, "other") is None
        assert 3500 < await client.ttl(keys.progress(namespace, "job")) <= 3600


async def test_what_readers_of_a_jobs_instances_say_is_added_to_what_its_agents_say(
    redis_url: str, namespace: str
) -> None:
    """Of the same run alone, from whichever comes first; counts of an instance that has left stay."""
    first = Progress(step=9, updated_at=100.0, answered={"a": 2, "b": 1}, teachers=2, waiting=0.1, limit="student")
    second = Progress(step=5, updated_at=101.0, answered={"a": 4}, teachers=1, waiting=0.5, limit="teachers", queued=3)
    left = Progress(step=5, updated_at=50.0, answered={"c": 1}, teachers=9, cached=7, waiting=0.9, limit="source")
    async with connect(redis_url) as client:
        for instance, reader in enumerate((first, second, left)):
            await progress.publish_reader(client, namespace, "job", reader, run="now", instance=instance)
        await progress.publish_reader(client, namespace, "job", first, run="before", instance=0)
        assert await progress.read(client, namespace, "job") is None
        await progress.publish(client, namespace, "job", Progress(step=7, updated_at=102.0, loss=0.5, run="now"))
        found = await progress.read(client, namespace, "job")
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
        await progress.publish(client, namespace, "job", Progress(step=8, updated_at=103.0, run="next"))
        found = await progress.read(client, namespace, "job")
        assert found
        assert found.answered == {}
        assert 3500 < await client.ttl(keys.readers_progress(namespace, "job", "now")) <= 3600


async def test_without_redis_a_report_is_an_error() -> None:
    """The caller decides what a lost report means."""
    async with connect("redis://127.0.0.1:1/0") as client:
        with pytest.raises(RegistryUnavailableError):
            await progress.publish(client, "n", "job", Progress(step=1, updated_at=1.0))
        with pytest.raises(RegistryUnavailableError):
            await progress.read(client, "n", "job")
