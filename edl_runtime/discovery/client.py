"""A student behind a discovery endpoint."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing, suppress

import msgspec

from edl_runtime.decoding import Decoder
from edl_runtime.discovery.link import Link
from edl_runtime.discovery.messages import SAY_EVERY_S, Assignment, Words
from edl_runtime.errors import DiscoveryRefusedError, DiscoveryUnavailableError
from edl_runtime.log import get_logger
from edl_runtime.registry.directory import SETTLE_S
from edl_runtime.registry.members import Member
from edl_runtime.waits import first

SHORTEST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Between attempts to come back; each is up to twice as long as the one before, by chance."""

LINE_LIMIT = 1 << 20
"""Bytes of an assignment: tens of thousands of teachers."""

log = get_logger(__name__)

_decoder = Decoder(Assignment)


async def follow(
    link: Link,
    pool: str,
    me: Member,
    use: Callable[[Assignment], None],
    say: Callable[[], Words],
) -> None:
    """Be that student of the pool and call `use` with each assignment, changed or not, until cancelled.

    What `say` returns is told about once a second. An endpoint that is lost is tried again for ever. When it comes back
    without teachers, that is believed after `SETTLE_S` only: its Redis may have been emptied.

    Raises DiscoveryUnavailableError and DiscoveryRefusedError when the first attempt to reach it fails.
    """
    path = f"/v1/pools/{pool}/students/{me.id}"
    async with aclosing(_assignments(link, path, me)) as assignments:
        use(await anext(assignments))
        await first(_use_all(assignments, use), _say(link, path, say))  # which only who is connected may


async def _use_all(assignments: AsyncIterable[Assignment], use: Callable[[Assignment], None]) -> None:
    async for assignment in assignments:
        use(assignment)


async def _assignments(link: Link, path: str, me: Member) -> AsyncGenerator[Assignment, None]:
    loop = asyncio.get_running_loop()
    known = away = False
    back_at = -math.inf
    pause_s = SHORTEST_PAUSE_S
    while True:
        cause = "it ended the stream"
        try:
            async with aclosing(_stream(link, path, me)) as lines:
                async for assignment in lines:
                    if away:
                        back_at = loop.time()
                        log.info("discovery.back", url=link.url)
                    known, away, pause_s = True, False, SHORTEST_PAUSE_S
                    if assignment.teachers or loop.time() > back_at + SETTLE_S:
                        yield assignment
        except (DiscoveryUnavailableError, DiscoveryRefusedError) as error:
            if not known:
                raise
            cause = error.cause
        if not away:
            log.warning("discovery.away", url=link.url, cause=cause)
        away = True
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - to come apart, not to hide
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _stream(link: Link, path: str, me: Member) -> AsyncGenerator[Assignment, None]:
    params = {"address": me.address, **({} if me.want is None else {"want": me.want})}
    async with link.ask("GET", path, params=params) as response:
        try:
            async for line in _lines(response.aiter_raw()):
                yield _decoder.decode(line)
        except msgspec.DecodeError as error:
            raise DiscoveryRefusedError(link.url, response.status_code, f"no assignment: {error}") from None


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > LINE_LIMIT:
            raise msgspec.DecodeError(f"a line of {LINE_LIMIT} bytes or more")


async def _say(link: Link, path: str, say: Callable[[], Words]) -> None:
    while True:
        words = msgspec.json.encode(say())
        with suppress(DiscoveryUnavailableError, DiscoveryRefusedError):  # the stream tells
            async with link.ask("PUT", f"{path}/words", content=words):
                pass
        await asyncio.sleep(SAY_EVERY_S)
