"""Jobs and pools that come and go: told by whoever starts one or sees it end, read by whoever has to rescale then.

It is told when it has happened: that a job has ended, when its last process is gone. Not always, and sometimes twice:
not while Redis is away, nor of what ends by itself while nobody follows it. So who reads looks at what there is now,
and at times without news too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import structlog

from edl_runtime.errors import RegistryUnavailableError
from edl_runtime.store import keys
from edl_runtime.store.client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

MOST_KEPT = 1000
"""So many are kept, or a few more."""

KEPT_S = 24 * 3600
"""How long they outlive the last."""

LONGEST_BLOCK_MS = 1000
"""`since` blocks no longer: the client takes a longer silence for a Redis that is away."""

What = Literal["submitted", "ended"]

_FIELD = "news"

log = structlog.get_logger(__name__)


class News(msgspec.Struct, frozen=True, kw_only=True):
    """A `job`, or pool, was submitted or has ended, `at` Unix seconds of the teller's clock."""

    job: str
    what: What
    at: float


async def tell(client: Redis, namespace: str, job: str, what: What) -> None:
    """Tell it. While Redis is away nobody hears of it, and this does nothing: it is no reason to fail a job."""
    news = News(job=job, what=what, at=time.time())
    key = keys.news(namespace)
    try:
        with unavailable_if_lost(client):
            async with client.pipeline(transaction=True) as both:
                both.xadd(key, {_FIELD: msgspec.json.encode(news)}, maxlen=MOST_KEPT, approximate=True)
                both.expire(key, KEPT_S)
                await both.execute()
    except RegistryUnavailableError as error:
        log.warning("news.untold", job=job, what=what, cause=str(error))


async def ago(client: Redis, seconds: float) -> str:
    """Return the id after which all was told in the last so many seconds. Raises RegistryUnavailableError."""
    with unavailable_if_lost(client):
        now, _ = await client.time()
    return f"{max(0, int((now - seconds) * 1000))}-0"


async def since(
    client: Redis, namespace: str, last_id: str, *, block_ms: int = LONGEST_BLOCK_MS
) -> tuple[str, list[News]]:
    """Return what was told since `last_id`, oldest first, and the `last_id` of the next call.

    Waits for news, `block_ms` at most; 0 does not wait. What can't be read, as of another version, is passed by.
    Raises RegistryUnavailableError.
    """
    key = keys.news(namespace)
    block = min(block_ms, LONGEST_BLOCK_MS) or None
    with unavailable_if_lost(client):
        found: Any = await client.xread({key: last_id}, block=block)
    entries = [entry for _, entries in found for entry in entries]
    read = [_read(fields) for _, fields in entries]
    return (entries[-1][0] if entries else last_id), [news for news in read if news]


def _read(fields: Any) -> News | None:
    content = fields.get(_FIELD, "")
    try:
        return msgspec.json.decode(content, type=News)
    except msgspec.DecodeError as error:
        log.warning("news.unreadable", content=content[:200], cause=str(error))
        return None
