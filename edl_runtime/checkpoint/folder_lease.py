"""Who holds a checkpoint folder: one job at a time.

Two jobs in one folder would prune each other's checkpoints and resume from each other's. So each process of a job
leases the folder for the job in Redis: instances share it, a restarted one finds its own job there, and another job
gets it when the last lease is released or has expired. A file lock keeps out processes that don't use the job's Redis:
the file has a random token, and who uses the job's Redis finds it there, by whatever address.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edl_runtime import locks
from edl_runtime.checkpoint.errors import CheckpointHeldError, CheckpointStoreError, FolderHolder
from edl_runtime.checkpoint.storage import LocalStorage, ask_storage, storage_at
from edl_runtime.log import get_logger
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError, RegistryError, RegistryUnavailableError
from edl_runtime.store.redis_client import connect, decode_record, run_script, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = get_logger(__name__)


def _holder_of(settings: RuntimeSettings) -> FolderHolder:
    """Return the job of this process, or this process where it belongs to none, as a holder from now on."""
    now = time.time()
    if not settings.redis_url or not settings.job:
        process = f"process {os.getpid()} on {socket.gethostname()}"
        by_hand = f"a script that was started by hand ({process})"
        return FolderHolder(namespace=settings.namespace, job="", since=now, process=by_hand, group=process)
    return FolderHolder(
        namespace=settings.namespace,
        job=settings.job,
        task=settings.checkpoint_stream,
        since=now,
        group=secrets.token_hex(8),
    )


# The lock, against processes that don't use the job's Redis.

FILE = ".edl-run"
"""The lock's file, which is in the folder while it is held."""
SETTLES_IN_S = 2.0
"""How long to wait while another process has the lock exclusively, or the file is empty: for a write or a removal."""
TRY_EVERY_S = 0.02


class FolderLock:
    """This process's lock on the checkpoint folder at `url`; nothing in an object store.

    Jobs on one Redis share the lock, because `FolderLease` decides between them. A script that is started by hand holds
    it alone. May be used from any thread.

    `holder` is this process's job. `token` identifies the lock among those of this Redis: the holder's own, or that of
    the processes it shares with.
    """

    def __init__(self, settings: RuntimeSettings, url: str) -> None:
        place = storage_at(url)
        self._url = url
        self._file = Path(place.url) / FILE if isinstance(place, LocalStorage) else None
        self.holder = _holder_of(settings)
        self._descriptor: int | None = None
        self._mutex = threading.Lock()
        self._closed = self._has_warned = False

    @property
    def token(self) -> str:
        return self.holder.group

    def take(self, known: Collection[str] = ()) -> None:
        """Lock the folder that is at the path now, unless it is locked.

        Shares the lock if its token is this one's own or `known`, the tokens in the job's Redis; raises
        CheckpointHeldError if not. If the file system has no locks, it only logs a warning, once.
        """
        with self._mutex:
            if self._file is None or self._closed:
                return
            if self._descriptor is not None and locks.is_still_at(self._file, self._descriptor):
                return
            self._release(self._file)
            try:
                self._descriptor = self._take(self._file, known)
            except OSError as error:
                if not self._has_warned:
                    log.warning("checkpoint.folder_not_locked", url=self._url, cause=str(error))
                self._has_warned = True

    def release(self) -> None:
        """Unlock the folder; `take` may lock it again."""
        with self._mutex:
            if self._file is not None:
                self._release(self._file)

    def close(self) -> None:
        """Unlock the folder for good."""
        self._closed = True
        self.release()

    def _take(self, file: Path, known: Collection[str]) -> int:
        until = time.monotonic() + SETTLES_IN_S
        found: FolderHolder | None = None
        while True:
            descriptor = locks.take(file)
            if descriptor is not None:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, msgspec.json.encode(self.holder), 0)
            else:
                try:
                    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
                except FileNotFoundError:  # the holder has just removed it
                    continue
            if locks.share(descriptor) and locks.is_still_at(file, descriptor):  # while shared, nobody writes to it
                seen, found = found, decode_record(os.pread(descriptor, 1 << 16, 0), FolderHolder)
                if found and found.group in (self.token, *known):
                    self.holder = msgspec.structs.replace(self.holder, group=found.group)
                    return descriptor
                if found and found == seen:  # seen once, it may be that of a holder that has just ended
                    until = 0.0
            os.close(descriptor)
            if time.monotonic() > until:
                unknown = FolderHolder(namespace="", job="", since=time.time(), process="another process")
                raise CheckpointHeldError(self._url, found or unknown)
            time.sleep(TRY_EVERY_S)

    def _release(self, file: Path) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            if locks.hold_alone(descriptor) and locks.is_still_at(file, descriptor):  # it is still this folder's file
                file.unlink()
        except OSError as error:
            log.warning("checkpoint.lock_not_removed", url=self._url, cause=str(error))
        finally:
            os.close(descriptor)


# The lease in Redis.

RENEW_EVERY_S = 1.0
"""At most: a job is back so soon after Redis was emptied."""
RETRY_EVERY_S = 0.25
"""While Redis is unavailable."""
POLL_EVERY_S = 0.1
"""How often to check whether another job renews its leases."""
FIND_EVERY_S = 3.0
"""How often to check whether the folder at the path is still the same."""
TOKEN_BACK_IN_S = 3.0
"""How long a new process waits for the holders to write their lock's token again to a Redis that has lost it."""
RELEASE_LIMIT_S = 5.0
"""How long the exit of a process waits for Redis."""

Lost = Callable[[CheckpointHeldError | MalformedRecordError], None]


class FolderLease:
    """A process's lease of the folder at `url`, for the job in `settings`. `take` it, then `keep` it."""

    def __init__(self, client: Redis, settings: RuntimeSettings, url: str) -> None:
        self._client = client
        self._settings = settings
        self._url = url
        self._member = f"{settings.instance}-{secrets.token_hex(4)}"
        self._folder = FolderLock(settings, url)
        self._keys: list[str] = []
        self._known_tokens: list[str] = []
        self._is_others = False

    async def take(self) -> None:
        """Take the lease; first wait for the leases of another job to expire if its processes may be dead.

        Raises CheckpointHeldError when another job renews its leases, or a process without this Redis holds the folder;
        CheckpointStoreError when the folder can't be used, MalformedRecordError, RegistryUnavailableError.
        """
        await self._find()
        first: float | None = None
        refused_at: float | None = None
        while True:
            found = await self._hold()
            if found is None:
                try:
                    return await self.lock()
                except CheckpointHeldError as error:
                    refused_at = refused_at or time.monotonic()
                    if error.holder.process or time.monotonic() >= refused_at + TOKEN_BACK_IN_S:
                        await self._release()
                        raise
            else:
                holder, deadline, left_s = found
                if first is None:
                    owner = {"job": holder.job, "namespace": holder.namespace, "task": holder.task}
                    log.info("checkpoint.folder_awaited", url=self._url, **owner, at_most_s=left_s)
                elif deadline > first:
                    self._is_others = True
                    self._folder.release()
                    raise CheckpointHeldError(self._url, holder)
                first = deadline
            await asyncio.sleep(POLL_EVERY_S)

    async def lock(self) -> None:
        """Lock the folder at the path against processes without this Redis, unless it is locked.

        Raises CheckpointHeldError, CheckpointStoreError. `take` does this, too.
        """
        await self._find()
        await asyncio.to_thread(self._folder.take, self._known_tokens)

    async def keep(self, lost: Lost) -> None:
        """Renew the lease until cancelled, then release it. Outages of Redis are survived.

        `lost` is called once when another job has taken the folder, or its record in Redis can't be read, until this
        job holds it again. If the folder is moved, removed or replaced, the lease moves to the one at its path.
        """
        away = damaged = False
        finding = asyncio.create_task(self._keep_finding(lost))
        try:
            while True:
                renew_s = min(self._settings.lease_ttl_s / 3, RENEW_EVERY_S)
                await asyncio.sleep(min(renew_s, RETRY_EVERY_S) if away else renew_s)
                try:
                    found = await self._hold()
                except MalformedRecordError as error:
                    if not damaged:
                        lost(error)
                    damaged = True
                    continue
                except RegistryUnavailableError:  # other parts of this process log it
                    away = True
                    continue
                if found and not self._is_others:
                    lost(CheckpointHeldError(self._url, found[0]))
                self._is_others, away, damaged = found is not None, False, False
        finally:
            finding.cancel()
            await asyncio.to_thread(self._folder.close)
            await self._release()

    async def _release(self) -> None:
        with suppress(RegistryError), unavailable_if_lost(self._client):  # it will expire
            await self._client.zrem(self._keys[0], self._member)

    async def _find(self) -> None:
        """Identify the folder at the path."""
        found = keys.checkpoint_lease(await asyncio.to_thread(ask_storage, self._url, storage_at(self._url).identity))
        if self._keys not in ([], found):
            log.warning("checkpoint.folder_changed", url=self._url, cause="it was moved, removed or replaced")
        self._keys = found  # the old folder's lease expires

    async def _keep_finding(self, lost: Lost) -> None:
        reported = False
        while True:
            await asyncio.sleep(FIND_EVERY_S)
            try:
                await self.lock()
                reported = False
            except CheckpointHeldError as error:
                if not reported and not self._is_others:
                    lost(error)
                reported = True
            except CheckpointStoreError:  # saving a checkpoint logs it
                continue

    async def _hold(self) -> tuple[FolderHolder, float, float] | None:
        """Take or renew the lease. If another job has it, return that job, its last deadline and the seconds left.

        The deadline is only comparable with later ones.
        """
        mine, lease_ms = self._folder.holder, max(1, round(self._settings.lease_ttl_s * 1000))
        arguments: list[str | int] = [
            self._member,
            lease_ms,
            f"{mine.namespace}/{mine.job}",
            msgspec.json.encode(mine).decode(),
            self._folder.token,
        ]
        self._known_tokens, *other = await run_script(self._client, "checkpoint_lease", self._keys, arguments)
        if not other:
            return None
        unknown = FolderHolder(namespace="unknown", job="one of another version", since=time.time())
        about, deadline, left_ms = other
        return decode_record(about, FolderHolder) or unknown, float(deadline), left_ms / 1000


def hold_until_exit(settings: RuntimeSettings, url: str) -> None:
    """Hold the folder at `url` until this process exits: for a script without an agent.

    Without Redis or a job's name only the folder's lock is taken. If Redis is unavailable, it logs a warning and
    continues. Raises CheckpointHeldError, MalformedRecordError, and CheckpointStoreError when the folder can't be used.
    """
    if not settings.redis_url or not settings.job:
        folder = FolderLock(settings, url)
        folder.take()
        atexit.register(folder.close)
        return
    started: Future[Callable[[], object]] = Future()
    thread = threading.Thread(
        target=lambda: asyncio.run(_hold_in_thread(settings, url, started)), name="checkpoint folder", daemon=True
    )
    thread.start()
    end = started.result()

    def release() -> None:
        with suppress(RuntimeError):  # the loop has ended
            end()
        thread.join(RELEASE_LIMIT_S)

    atexit.register(release)


async def _hold_in_thread(settings: RuntimeSettings, url: str, started: Future[Callable[[], object]]) -> None:
    """Hold the folder until the function in `started` is called. `started` gets the errors of the start."""
    try:
        async with connect(settings.redis_url) as client:
            lease = FolderLease(client, settings, url)
            try:
                await lease.take()
            except MalformedRecordError:  # said at the start, as nothing runs yet
                raise
            except RegistryUnavailableError as error:
                log.warning("checkpoint.folder_not_held", url=url, cause=str(error))
                await lease.lock()
            keeping = asyncio.create_task(
                lease.keep(lambda error: log.warning("checkpoint.folder_lost", cause=str(error)))
            )
            loop = asyncio.get_running_loop()
            started.set_result(lambda: loop.call_soon_threadsafe(keeping.cancel))
            with suppress(asyncio.CancelledError):
                await keeping
    except Exception as error:
        if started.done():
            raise
        started.set_exception(error)


# The leases of a job's agent.

REDIS_RETRY_S = 1.0
"""How long an agent waits while Redis is unavailable; longer than jobs take that already hold a folder."""
REPORT_WAIT_AFTER_S = 5.0
"""How long an agent waits for a folder before it reports that."""


class JobFolderLeases:
    """Leases of the folders of one agent's job: EDL_CHECKPOINT, and others that its script names. `run` it in a task.

    `notify` gets texts for the job's owner, `changed` is called when the results of this object have changed.
    """

    def __init__(
        self, client: Redis, settings: RuntimeSettings, *, notify: Callable[[str], None], changed: Callable[[], None]
    ) -> None:
        self._client = client
        self._settings = settings
        self._notify = notify
        self._changed = changed
        self._settled: dict[str, bool] = {}
        self._added: asyncio.Queue[str] = asyncio.Queue()
        self._conflicts: list[CheckpointHeldError | MalformedRecordError] = []

    @property
    def are_held(self) -> bool:
        """Whether the job may train: no lease is being waited for."""
        return all(self._settled.values())

    def add(self, url: str) -> None:
        """Take a lease of this folder as well, unless there is one; "" for none."""
        if not url:
            return
        folder = storage_at(url).url
        if folder not in self._settled:
            self._settled[folder] = False
            self._added.put_nowait(folder)

    def take_conflicts(self) -> list[CheckpointHeldError | MalformedRecordError]:
        """Return the errors of leases that could not be taken since the last call."""
        conflicts, self._conflicts = self._conflicts, []
        return conflicts

    async def run(self) -> None:
        """Hold the leases until cancelled, then release them."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._hold(await self._added.get()))

    async def _hold(self, url: str) -> None:
        lease = FolderLease(self._client, self._settings, url)
        try:
            await self._take(lease, url)
        except (CheckpointHeldError, MalformedRecordError) as error:
            self._conflicts.append(error)
        except CheckpointStoreError as error:  # a script that writes there gets the same error
            log.warning("checkpoint.folder_not_held", url=url, cause=str(error))
            self._settle(url)
            return
        self._settle(url)
        await lease.keep(self._report_lost)

    async def _take(self, lease: FolderLease, url: str) -> None:
        since, reported = time.monotonic(), False
        while True:
            try:
                return await lease.take()
            except MalformedRecordError:  # said at the start, as nothing runs yet
                raise
            except RegistryUnavailableError as error:
                if not reported and time.monotonic() >= since + REPORT_WAIT_AFTER_S:
                    log.warning("checkpoint.folder_awaited", url=url, cause=str(error))
                    keys_in_redis = "edl:{checkpoint-folder/…}"
                    self._notify(f"training waits for the lease of {url} ({keys_in_redis} in Redis): {error}")
                    reported = True
                await asyncio.sleep(REDIS_RETRY_S)

    def _settle(self, url: str) -> None:
        self._settled[url] = True
        self._changed()

    def _report_lost(self, error: CheckpointHeldError | MalformedRecordError) -> None:
        log.error("checkpoint.folder_lost", cause=str(error))
        cause = "That job took the folder while this job's lease was lost."
        if isinstance(error, MalformedRecordError):
            cause = "So this job no longer holds its checkpoint folder."
        self._notify(f"{error}. {cause} Training continues")
