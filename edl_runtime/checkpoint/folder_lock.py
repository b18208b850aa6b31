"""A lock on a checkpoint folder, against processes that don't use the job's Redis."""

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
"""The lock's file, which is in the folder while it is held."""
SETTLES_IN_S = 2.0
"""How long to wait for a process that has the lock exclusively; it needs that only to write or remove the file."""
TRY_EVERY_S = 0.02

log = get_logger(__name__)


class FolderHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The job that uses a folder since this Unix time; the fields are those of CheckpointHeldError."""

    namespace: str
    job: str
    since: float
    task: str = ""
    process: str = ""

    def error(self, url: str) -> CheckpointHeldError:
        """Return the error for another job that uses the same folder as `url`."""
        since = datetime.fromtimestamp(self.since).astimezone()
        return CheckpointHeldError(
            url, job=self.job, namespace=self.namespace, task=self.task, since=since, process=self.process
        )


class _Hold(msgspec.Struct, frozen=True):
    """The content of the lock's file: the group of processes that share the folder, and the first of them."""

    group: str
    first: FolderHolder


class FolderLock:
    """This process's lock on the checkpoint folder at `url`; nothing in an object store.

    Jobs on one Redis share the lock, because `FolderLease` decides between them. A script that is started by hand holds
    it alone. May be used from any thread.
    """

    def __init__(self, settings: RuntimeSettings, url: str) -> None:
        place = storage_at(url)
        self._url = url
        self._file = Path(place.url) / FILE if isinstance(place, LocalStorage) else None
        self._mine = _hold_of(settings)
        self._descriptor: int | None = None
        self._mutex = threading.Lock()
        self._closed = self._has_warned = False

    def take(self) -> None:
        """Lock the folder that is at the path now, unless it is locked. Raises CheckpointHeldError.

        If the file system has no locks, it only logs a warning, once.
        """
        with self._mutex:
            if self._file is None or self._closed:
                return
            if self._descriptor is not None and locks.is_still_at(self._file, self._descriptor):
                return
            self._release(self._file)
            try:
                self._descriptor = self._take(self._file)
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

    def _take(self, file: Path) -> int:
        until = time.monotonic() + SETTLES_IN_S
        while True:
            descriptor = locks.take(file)
            if descriptor is not None:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, msgspec.json.encode(self._mine), 0)
            else:
                descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if locks.share(descriptor) and locks.is_still_at(file, descriptor):  # while shared, nobody writes to it
                found = decode_record(os.pread(descriptor, 1 << 16, 0), _Hold)
                if found and found.group == self._mine.group:
                    return descriptor
                os.close(descriptor)
                raise (found.first if found else _unknown()).error(self._url)
            os.close(descriptor)
            if time.monotonic() > until:
                raise _unknown().error(self._url)
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


def _unknown() -> FolderHolder:
    return FolderHolder(namespace="", job="", since=time.time(), process="another process")


def _hold_of(settings: RuntimeSettings) -> _Hold:
    now = time.time()
    if not settings.redis_url or not settings.job:
        process = f"process {os.getpid()} on {socket.gethostname()}"
        by_hand = f"a script that was started by hand ({process})"
        return _Hold(process, FolderHolder(namespace=settings.namespace, job="", since=now, process=by_hand))
    holder = FolderHolder(namespace=settings.namespace, job=settings.job, task=settings.checkpoint_stream, since=now)
    # The job's machines may use different host names for one Redis, but the same port and database.
    port, database = address_of(settings.redis_url).rpartition(":")[2], urlsplit(settings.redis_url).path.strip("/")
    return _Hold(f"Redis {port} {database or '0'}", holder)
