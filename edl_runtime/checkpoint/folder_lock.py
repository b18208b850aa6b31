"""A folder of checkpoints, held against those who share no Redis with its job: by a lock in it."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from edl_runtime import locks
from edl_runtime.checkpoint.errors import CheckpointHeldError
from edl_runtime.checkpoint.storage import LocalStorage, storage_at
from edl_runtime.log import get_logger
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import address_of, decode_record

FILE = ".edl-run"
"""In the folder, as long as somebody holds it."""
SETTLES_IN_S = 2.0
"""How long somebody may have the lock alone, which takes no time: who comes or goes does."""
TRY_EVERY_S = 0.02

log = get_logger(__name__)


class FolderHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The job that keeps checkpoints at a place, since this Unix time. `task`: as in CheckpointHeldError.

    `process`: as there, too.
    """

    namespace: str
    job: str
    since: float
    task: str = ""
    process: str = ""

    def error(self, url: str) -> CheckpointHeldError:
        """Return what another job is told that names `url`, the same place."""
        since = datetime.fromtimestamp(self.since).astimezone()
        return CheckpointHeldError(
            url, job=self.job, namespace=self.namespace, task=self.task, since=since, process=self.process
        )


class _Hold(msgspec.Struct, frozen=True):
    """What the lock's file says: among whom the folder is shared, and who of them came first."""

    among: str
    first: FolderHolder


class FolderLock:
    """This process's hold on the folder of checkpoints at `url`. A place in an object store has none.

    Those who share a Redis hold a folder together, for whose it is they settle there (`PlaceLease`). A script that is
    started by hand holds it alone. May be used from any thread.
    """

    def __init__(self, settings: RuntimeSettings, url: str) -> None:
        place = storage_at(url)
        self._url = url
        self._file = Path(place.url) / FILE if isinstance(place, LocalStorage) else None
        self._mine = _hold_of(settings)
        self._descriptor: int | None = None
        self._mutex = threading.Lock()
        self._closed = self._told = False

    def take(self) -> None:
        """Hold the folder that is there now, unless that is done. Raises CheckpointHeldError.

        Where the file system knows no locks it goes on without one, and the log says so once.
        """
        with self._mutex:
            if self._file is None or self._closed:
                return
            if self._descriptor is not None and locks.is_still_at(self._file, self._descriptor):
                return
            self._let_go(self._file)
            try:
                self._descriptor = self._take(self._file)
            except OSError as error:
                if not self._told:
                    log.warning("checkpoint.place_not_held", url=self._url, cause=str(error))
                self._told = True

    def let_go(self) -> None:
        """Hold it no longer; `take` may hold it again."""
        with self._mutex:
            if self._file is not None:
                self._let_go(self._file)

    def close(self) -> None:
        """Let go for good."""
        self._closed = True
        self.let_go()

    def _take(self, file: Path) -> int:
        until = time.monotonic() + SETTLES_IN_S
        while True:
            descriptor = locks.take(file)
            if descriptor is not None:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, msgspec.json.encode(self._mine), 0)
            else:
                descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if locks.share(descriptor) and locks.is_still_at(file, descriptor):  # nobody writes into it meanwhile
                found = decode_record(os.pread(descriptor, 1 << 16, 0), _Hold)
                if found and found.among == self._mine.among:
                    return descriptor
                os.close(descriptor)
                raise (found.first if found else _unknown()).error(self._url)
            os.close(descriptor)
            if time.monotonic() > until:
                raise _unknown().error(self._url)
            time.sleep(TRY_EVERY_S)

    def _let_go(self, file: Path) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            if locks.hold_alone(descriptor) and locks.is_still_at(file, descriptor):  # not that of another folder
                file.unlink()
        except OSError as error:
            log.warning("checkpoint.lock_left", url=self._url, cause=str(error))
        finally:
            os.close(descriptor)


def _unknown() -> FolderHolder:
    return FolderHolder(namespace="", job="", since=time.time(), process="another process")


def _hold_of(settings: RuntimeSettings) -> _Hold:
    now = time.time()
    if not settings.redis_url or not settings.job:
        who = f"process {os.getpid()} on {socket.gethostname()}"
        by_hand = f"a script that was started by hand ({who})"
        return _Hold(who, FolderHolder(namespace=settings.namespace, job="", since=now, process=by_hand))
    holder = FolderHolder(namespace=settings.namespace, job=settings.job, task=settings.checkpoint_stream, since=now)
    # A job's machines may know its Redis by several names. Its port and database are the same for all.
    port, database = address_of(settings.redis_url).rpartition(":")[2], urlsplit(settings.redis_url).path.strip("/")
    return _Hold(f"Redis {port} {database or '0'}", holder)
