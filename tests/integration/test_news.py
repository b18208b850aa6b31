"""Jobs that come and go, told through a real Redis."""

from __future__ import annotations

import asyncio
import time

import pytest

from edl_runtime.autoscale import news
from edl_runtime.autoscale.news import News
from edl_runtime.errors import RegistryUnavailableError
from edl_runtime.store import keys
from edl_runtime.store.client import connect


def _said(found: list[News]) -> list[tuple[str, str]]:
    return [(one.job, one.what) for one in found]


async def test_news_are_heard_once_by_whoever_remembers_how_far_he_was(redis_url: str, namespace: str) -> None:
    """Oldest first, with the time; another version's are passed by."""
    async with connect(redis_url) as client:
        start = await news.ago(client, 60)
        assert await news.since(client, namespace, start, block_ms=0) == (start, [])
        await news.tell(client, namespace, "a", "submitted")
        await client.xadd(keys.news(namespace), {"news": "what is this"})
        await news.tell(client, namespace, "b", "ended")
        last, found = await news.since(client, namespace, start)
        assert _said(found) == [("a", "submitted"), ("b", "ended")]
        assert abs(found[0].at - time.time()) < 30
        assert await news.since(client, namespace, last, block_ms=0) == (last, [])
        assert await client.ttl(keys.news(namespace)) > news.KEPT_S - 60


async def test_news_wake_whoever_waits(redis_url: str, namespace: str) -> None:
    """And it waits no longer than the client's patience."""
    async with connect(redis_url) as client, connect(redis_url) as other:
        start = await news.ago(client, 0.001)
        waiting = asyncio.create_task(news.since(client, namespace, start, block_ms=60_000))
        await news.tell(other, namespace, "a", "submitted")
        assert _said((await waiting)[1]) == [("a", "submitted")]


async def test_while_redis_is_away_nobody_hears_and_nothing_fails() -> None:
    """To tell is never an error; to ask is."""
    async with connect("redis://127.0.0.1:1/0") as client:
        await news.tell(client, "team", "a", "submitted")
        with pytest.raises(RegistryUnavailableError):
            await news.since(client, "team", "0-0")
        with pytest.raises(RegistryUnavailableError):
            await news.ago(client, 60)
