"""Whose a place of checkpoints is: one job's at a time.

Two jobs at one place would prune each other's checkpoints, and each would go on from what the other trained. So a job's
processes hold the place by leases in Redis, all of them for the job: its instances share it, a restarted one finds its
own job there, and the next job gets it when the last lease is let go of or has run out. Who shares no Redis with them
is told apart by a lock in the folder (`FolderLock`).
"""

from __future__ import annotations

import asyncio
import atexit
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.checkpoint.folder_lock import FolderLock, PlaceHolder
from edl_runtime.checkpoint.storage import storage_at
from edl_runtime.checkpoint.trying import trying
from edl_runtime.errors import CheckpointHeldError, CheckpointStoreError, MalformedRecordError, RegistryUnavailableError
from edl_runtime.log import get_logger
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys
from edl_runtime.store.client import connect, run_script, unavailable_if_lost
from edl_runtime.store.records import decoded

if TYPE_CHECKING:
    from redis.asyncio import Redis

RENEW_EVERY_S = 1.0
"""At the latest: so soon is a job back in a Redis that was emptied."""
RETRY_EVERY_S = 0.25
"""While Redis does not answer."""
LOOK_EVERY_S = 0.1
"""How often it is looked whether another job's processes renew their leases, or have died."""
FIND_EVERY_S = 3.0
"""How often it is looked whether the folder is still the one that was taken."""
LETS_GO_WITHIN_S = 5.0
"""How long the end of a process waits for Redis."""

log = get_logger(__name__)

Lost = Callable[[CheckpointHeldError | MalformedRecordError], None]


class PlaceLease:
    """One process's lease of the place at `url`, for the job in `settings`. `take` it, then `keep` it."""

    def __init__(self, client: Redis, settings: RuntimeSettings, url: str) -> None:
        self._client = client
        self._settings = settings
        self._url = url
        self._member = f"{settings.instance}-{secrets.token_hex(4)}"
        self._folder = FolderLock(settings, url)
        self._keys: list[str] = []
        self._is_others = False

    async def take(self) -> None:
        """Hold the place, once leases of another job whose processes may have died have run out.

        Says in the log whom it waits for. Raises CheckpointHeldError when another job renews its own, or when somebody
        without this Redis keeps checkpoints there; CheckpointStoreError when the place can't be used,
        MalformedRecordError, RegistryUnavailableError.
        """
        await self._find()
        first: float | None = None
        while found := await self._hold():
            holder, deadline, left_s = found
            if first is None:
                whose = {"job": holder.job, "namespace": holder.namespace, "task": holder.task}
                log.info("checkpoint.place_awaited", url=self._url, **whose, at_most_s=left_s)
            elif deadline > first:
                self._is_others = True
                self._folder.let_go()
                raise holder.error(self._url)
            first = deadline
            await asyncio.sleep(LOOK_EVERY_S)

    async def keep(self, lost: Lost) -> None:
        """Renew the lease until cancelled, then let go of it. Redis may go away meanwhile, and nothing ends by that.

        `lost` is called when another job has taken the place, or what Redis holds of it can't be read; once until the
        place is this job's again. If the folder is moved, removed or replaced, what is at its path is held from then
        on.
        """
        from redis.exceptions import ResponseError

        away = damaged = False
        finding = asyncio.create_task(self._keep_finding(lost))
        try:
            while True:
                renew_s = min(self._settings.lease_ttl_s / 3, RENEW_EVERY_S)
                await asyncio.sleep(min(renew_s, RETRY_EVERY_S) if away else renew_s)
                try:
                    found = await self._hold()
                except RegistryUnavailableError:  # whoever else of this process needs Redis says so
                    away = True
                    continue
                except MalformedRecordError as error:
                    if not damaged:
                        lost(error)
                    damaged = True
                    continue
                if found and not self._is_others:
                    lost(found[0].error(self._url))
                self._is_others, away, damaged = found is not None, False, False
        finally:
            finding.cancel()
            await asyncio.to_thread(self._folder.close)
            # it will run out by itself
            with suppress(RegistryUnavailableError, ResponseError), unavailable_if_lost(self._client):
                await self._client.zrem(self._keys[0], self._member)

    async def _find(self) -> None:
        """Find which folder is at the place, and hold it against those who share no Redis with this job."""
        found = keys.of_place(await asyncio.to_thread(trying, self._url, storage_at(self._url).identity))
        if self._keys not in ([], found):
            log.warning("checkpoint.place_changed", url=self._url, cause="it was moved, removed or replaced")
        self._keys = found  # the lease of what was there before runs out by itself
        await asyncio.to_thread(self._folder.take)

    async def _keep_finding(self, lost: Lost) -> None:
        told = False
        while True:
            await asyncio.sleep(FIND_EVERY_S)
            try:
                await self._find()
                told = False
            except CheckpointHeldError as error:
                if not told and not self._is_others:
                    lost(error)
                told = True
            except CheckpointStoreError:  # who writes there says so
                continue

    async def _hold(self) -> tuple[PlaceHolder, float, float] | None:
        """Take or renew the lease. Return whose the place is instead, the last deadline of its leases, and s until it.

        The deadline is only there to be compared with another one.
        """
        settings = self._settings
        mine = PlaceHolder(
            namespace=settings.namespace, job=settings.job, task=settings.checkpoint_stream, since=time.time()
        )
        job, lease_ms = f"{settings.namespace}/{settings.job}", max(1, round(settings.lease_ttl_s * 1000))
        words: list[str | int] = [self._member, lease_ms, job, msgspec.json.encode(mine).decode()]
        answer = await run_script(self._client, "place_hold", self._keys, words)
        if not answer:
            return None
        unknown = PlaceHolder(namespace="unknown", job="one of another version", since=mine.since)
        about, deadline, left_ms = answer
        return decoded(about, PlaceHolder) or unknown, float(deadline), left_ms / 1000


def hold_until_exit(settings: RuntimeSettings, url: str) -> None:
    """Hold the place at `url` until this process exits: for a script that is a job's, and that no agent looks after.

    One that a person has started without Redis or a job's name holds a folder against all others. One that can't reach
    Redis goes on and says so. Raises CheckpointHeldError, MalformedRecordError, and CheckpointStoreError when the place
    can't be used.
    """
    if not settings.redis_url or not settings.job:
        folder = FolderLock(settings, url)
        folder.take()
        atexit.register(folder.close)
        return
    begun: Future[Callable[[], object]] = Future()
    thread = threading.Thread(
        target=lambda: asyncio.run(_hold_aside(settings, url, begun)), name="checkpoint place", daemon=True
    )
    thread.start()
    end = begun.result()

    def let_go() -> None:
        with suppress(RuntimeError):  # the thread has ended, and its loop with it
            end()
        thread.join(LETS_GO_WITHIN_S)

    atexit.register(let_go)


async def _hold_aside(settings: RuntimeSettings, url: str, begun: Future[Callable[[], object]]) -> None:
    """Hold the place until what `begun` is given is called. What is raised before is for who waits for it."""
    try:
        async with connect(settings.redis_url) as client:
            lease = PlaceLease(client, settings, url)
            try:
                await lease.take()
            except RegistryUnavailableError as error:
                log.warning("checkpoint.place_not_held", url=url, cause=str(error))
            keeping = asyncio.create_task(lease.keep(_warn))
            loop = asyncio.get_running_loop()
            begun.set_result(lambda: loop.call_soon_threadsafe(keeping.cancel))
            with suppress(asyncio.CancelledError):
                await keeping
    except Exception as error:
        if begun.done():
            raise
        begun.set_exception(error)


def _warn(error: CheckpointHeldError | MalformedRecordError) -> None:
    log.warning("checkpoint.place_lost", cause=str(error))
