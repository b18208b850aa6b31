"""What the web needs, from a Redis stream to which its tier adds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, cast

from edl_runtime.autoscale.profile import Sample
from edl_runtime.autoscale.sources.base import Record, sift
from edl_runtime.autoscale.sources.spec import RedisStream
from edl_runtime.errors import SpecError
from edl_runtime.store.client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

PAGE = 1_000
"""Entries that are asked for at once: reading more would hold up others in the loop."""


class StreamSource:
    """Reads the entries whose ids are of the time that is asked for, or later: none is of a time after its id's."""

    def __init__(self, spec: RedisStream, client: Redis) -> None:
        self._stream = spec.stream
        self._client = client

    async def samples(self, since_s: float, until_s: float) -> list[Sample]:
        """Return what was needed; see `Source`. Entries that can't be read are skipped, and their number logged."""
        records = [record async for record in self._records(since_s)]
        return await asyncio.to_thread(sift, f"the Redis stream {self._stream!r}", records, since_s, until_s)

    async def _records(self, since_s: float) -> AsyncIterator[Record]:
        least = f"{max(0, int(since_s * 1000))}-0"
        while entries := await self._page(least):
            for entry_id, fields in entries:
                at = f"{int(entry_id.partition('-')[0]) / 1000}"
                yield f"entry {entry_id}", fields.get("at", at), fields.get("needed", "")
            if len(entries) < PAGE:
                return
            least = f"({entries[-1][0]}"

    async def _page(self, least: str) -> list[tuple[str, Mapping[str, str]]]:
        from redis.exceptions import ResponseError

        try:
            with unavailable_if_lost(self._client):
                entries = await self._client.xrange(self._stream, min=least, count=PAGE)
                return cast(list[tuple[str, Mapping[str, str]]], entries)
        except ResponseError as error:
            allowed = f"the key of a stream; Redis says: {error}"
            raise SpecError("traffic.redis.stream", self._stream, allowed) from None
