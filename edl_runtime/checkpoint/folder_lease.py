"""Leases on checkpoint folders: one job at a time may use a folder.

Two jobs in one folder would prune each other's checkpoints, and each would go on from what the other trained. So the
processes of a job hold the folder by leases in Redis, all of them for the job: its instances share it, a restarted one
finds its own job there, and the next job gets it when the last lease is released or has expired.
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

from edl_runtime.checkpoint.errors import CheckpointHeldError, CheckpointStoreError
from edl_runtime.checkpoint.folder_lock import FolderHolder, FolderLock
from edl_runtime.checkpoint.storage import ask_storage, storage_at
from edl_runtime.log import get_logger
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError, RegistryUnavailableError
from edl_runtime.store.redis_client import connect, decode_record, run_script, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

RENEW_EVERY_S = 1.0
"""At the latest: so soon is a job back in a Redis that was emptied."""
RETRY_EVERY_S = 0.25
"""While Redis does not answer."""
POLL_EVERY_S = 0.1
"""How often it is looked whether another job's processes renew their leases, or have died."""
FIND_EVERY_S = 3.0
"""How often it is looked whether the folder is still the one that was taken."""
RELEASE_LIMIT_S = 5.0
"""How long the end of a process waits for Redis."""

log = get_logger(__name__)

Lost = Callable[[CheckpointHeldError | MalformedRecordError], None]


class FolderLease:
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
            await asyncio.sleep(POLL_EVERY_S)

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
        found = keys.checkpoint_lease(await asyncio.to_thread(ask_storage, self._url, storage_at(self._url).identity))
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

    async def _hold(self) -> tuple[FolderHolder, float, float] | None:
        """Take or renew the lease. Return whose the place is instead, the last deadline of its leases, and s until it.

        The deadline is only there to be compared with another one.
        """
        settings = self._settings
        mine = FolderHolder(
            namespace=settings.namespace, job=settings.job, task=settings.checkpoint_stream, since=time.time()
        )
        job, lease_ms = f"{settings.namespace}/{settings.job}", max(1, round(settings.lease_ttl_s * 1000))
        words: list[str | int] = [self._member, lease_ms, job, msgspec.json.encode(mine).decode()]
        answer = await run_script(self._client, "checkpoint_lease", self._keys, words)
        if not answer:
            return None
        unknown = FolderHolder(namespace="unknown", job="one of another version", since=mine.since)
        about, deadline, left_ms = answer
        return decode_record(about, FolderHolder) or unknown, float(deadline), left_ms / 1000


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
        target=lambda: asyncio.run(_hold_in_thread(settings, url, begun)), name="checkpoint place", daemon=True
    )
    thread.start()
    end = begun.result()

    def let_go() -> None:
        with suppress(RuntimeError):  # the thread has ended, and its loop with it
            end()
        thread.join(RELEASE_LIMIT_S)

    atexit.register(let_go)


async def _hold_in_thread(settings: RuntimeSettings, url: str, begun: Future[Callable[[], object]]) -> None:
    """Hold the place until what `begun` is given is called. What is raised before is for who waits for it."""
    try:
        async with connect(settings.redis_url) as client:
            lease = FolderLease(client, settings, url)
            try:
                await lease.take()
            except RegistryUnavailableError as error:
                log.warning("checkpoint.place_not_held", url=url, cause=str(error))
            keeping = asyncio.create_task(lease.keep(_log_stolen))
            loop = asyncio.get_running_loop()
            begun.set_result(lambda: loop.call_soon_threadsafe(keeping.cancel))
            with suppress(asyncio.CancelledError):
                await keeping
    except Exception as error:
        if begun.done():
            raise
        begun.set_exception(error)


def _log_stolen(error: CheckpointHeldError | MalformedRecordError) -> None:
    log.warning("checkpoint.place_lost", cause=str(error))


# Where a job keeps its checkpoints, held by each of its agents for it; see `edl_runtime.checkpoint.folder_lease`.

REDIS_RETRY_S = 1.0
"""How long an agent waits where Redis did not answer: jobs that have held their places come back sooner."""
WAITS_UNTOLD_S = 5.0
"""How long an agent waits for a place before it says what for."""


class JobFolderLeases:
    """The places of one agent's job: that of EDL_CHECKPOINT, and where its script says otherwise. `run` it in a task.

    `told` is given what the job's owner is to know, `changed` called when something else is to be asked here.
    """

    def __init__(
        self, client: Redis, settings: RuntimeSettings, *, told: Callable[[str], None], changed: Callable[[], None]
    ) -> None:
        self._client = client
        self._settings = settings
        self._told = told
        self._changed = changed
        self._settled: dict[str, bool] = {}
        self._added: asyncio.Queue[str] = asyncio.Queue()
        self._refusals: list[CheckpointHeldError | MalformedRecordError] = []

    @property
    def are_held(self) -> bool:
        """Whether the job may train, as far as its places are concerned."""
        return all(self._settled.values())

    def add(self, url: str) -> None:
        """Have the job hold this place as well, if it does not yet; "" for nowhere."""
        if not url:
            return
        place = storage_at(url).url
        if place not in self._settled:
            self._settled[place] = False
            self._added.put_nowait(place)

    def take_conflicts(self) -> list[CheckpointHeldError | MalformedRecordError]:
        """Return which places turned out to be other jobs', or nobody knows whose, since this was last asked."""
        refusals, self._refusals = self._refusals, []
        return refusals

    async def run(self) -> None:
        """Hold the places until cancelled, and let go of them."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._hold(await self._added.get()))

    async def _hold(self, url: str) -> None:
        lease = FolderLease(self._client, self._settings, url)
        try:
            await self._take(lease, url)
        except (CheckpointHeldError, MalformedRecordError) as error:
            self._refusals.append(error)
        except CheckpointStoreError as error:  # a script that writes there finds that out by itself
            log.warning("checkpoint.place_not_held", url=url, cause=str(error))
            self._settle(url)
            return
        self._settle(url)
        await lease.keep(self._report_lost)

    async def _take(self, lease: FolderLease, url: str) -> None:
        since, told = time.monotonic(), False
        while True:
            try:
                return await lease.take()
            except RegistryUnavailableError as error:  # that Redis is away the agent's loop says, too
                if not told and time.monotonic() >= since + WAITS_UNTOLD_S:
                    log.warning("checkpoint.place_awaited", url=url, cause=str(error))
                    text = (
                        f"nothing is trained before this job holds {url} by the keys edl:{{place/…}} of Redis: {error}"
                    )
                    self._told(text)
                    told = True
                await asyncio.sleep(REDIS_RETRY_S)

    def _settle(self, url: str) -> None:
        self._settled[url] = True
        self._changed()

    def _report_lost(self, error: CheckpointHeldError | MalformedRecordError) -> None:
        log.error("checkpoint.place_lost", cause=str(error))
        how = "That one took the place while this job's hold on it was lost; this job"
        if isinstance(error, MalformedRecordError):
            how = "This job no longer holds the place of its checkpoints by that; it"
        self._told(f"{error}. {how} goes on meanwhile")
