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


async def test_without_redis_a_report_is_an_error() -> None:
    """The caller decides what a lost report means."""
    async with connect("redis://127.0.0.1:1/0") as client:
        with pytest.raises(RegistryUnavailableError):
            await progress.publish(client, "n", "job", Progress(step=1, updated_at=1.0))
        with pytest.raises(RegistryUnavailableError):
            await progress.read(client, "n", "job")
