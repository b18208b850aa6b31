"""Checkpoints written in the background of a running training, from buffers that are reused."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from edl_runtime.checkpoint.errors import CheckpointError
from edl_runtime.checkpoint.file_format import Arrays, CheckpointInfo, CheckpointPosition, Snapshot, position_of
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.errors import EdlError
from edl_runtime.log import get_logger

NICENESS = 10
"""How far a thread of the writer's stands back for those that compute."""

log = get_logger(__name__)

Capture = Callable[[], Snapshot]


class CheckpointWriter:
    """Writes checkpoints to a store and prunes it, one at a time, in a thread of its own.

    `saved` is told each finished checkpoint and the seconds that it took, `failed` each error of one that it writes in
    the background, and `overtaken` once the name of one that is there of a later generation than its own; all in the
    thread that writes. Use it from one thread, and `close` it.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        saved: Callable[[CheckpointInfo, float], None] | None = None,
        failed: Callable[[EdlError], None] | None = None,
        overtaken: Callable[[str], None] | None = None,
    ) -> None:
        self._store = store
        self._saved = saved
        self._failed = failed
        self._overtaken = overtaken
        self._is_overtaken = False
        self._buffers = HostBuffers()
        self._preparing: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._last: CheckpointInfo | None = None

    def prepare(self, arrays: Arrays) -> None:
        """Get the memory that `save` copies such arrays to, so that the first one is as quick as the others.

        In the background, once: for 200 MB it takes a fifth of a second, and several where much else is computed.
        """
        self._preparing = threading.Thread(target=self._reserve, args=(arrays,), name="edl-checkpoint", daemon=True)
        self._preparing.start()

    def save(self, capture: Capture) -> bool:
        """Copy what `capture` returns, which may be views of live memory, and write it in the background.

        Returns False, and calls nothing, while the one before is still being written: the training is not held up, and
        this checkpoint is left out. What fails later is logged and told, never raised here.
        """
        if not self.wait(0):
            log.warning("checkpoint.skipped", url=self._store.spec.url, reason="the one before is still being written")
            return False
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        snapshot = self._buffers.copy(capture())
        self._thread = threading.Thread(target=self._write_aside, args=(snapshot,), name="edl-checkpoint", daemon=True)
        self._thread.start()
        return True

    def save_now(self, capture: Capture) -> CheckpointInfo:
        """Write what `capture` returns, after the one that is being written, and return once it is stored.

        If that was of the same step, and no metrics were noted since, it is returned. Raises CheckpointError.
        """
        self.wait()
        snapshot, last = capture(), self._last
        position = CheckpointPosition(snapshot.generation, snapshot.step)
        if last is not None and (last.position, last.manifest.metrics) == (position, snapshot.metrics):
            return last
        return self._write(snapshot)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return once nothing is being written any more; False if something still is after `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait as `wait`, and free the memory. What is still being written then is lost if the process ends."""
        self._buffers = HostBuffers()
        return self.wait(timeout_s)

    def _reserve(self, arrays: Arrays) -> None:
        _lower_priority()
        self._buffers.reserve(arrays)

    def _write_aside(self, snapshot: Snapshot) -> None:
        _lower_priority()
        try:
            self._write(snapshot)
        except EdlError as error:
            if self._failed is not None:
                self._failed(error)

    def _write(self, snapshot: Snapshot) -> CheckpointInfo:
        began = time.monotonic()
        try:
            info = self._store.write(snapshot)
        except EdlError as error:
            log.warning("checkpoint.failed", generation=snapshot.generation, step=snapshot.step, cause=str(error))
            raise
        took_s = time.monotonic() - began
        self._last = info
        log.info("checkpoint.saved", url=info.url, size_mb=info.size_bytes / 1e6, took_s=took_s)
        if self._saved is not None:
            self._saved(info, took_s)
        try:
            self._look_for_later(info)
            self._store.prune()
        except CheckpointError as error:
            log.warning("checkpoint.not_pruned", cause=str(error))
        return info

    def _look_for_later(self, info: CheckpointInfo) -> None:
        newest = next(iter(self._store.names()), info.name)
        if self._is_overtaken or position_of(newest).generation <= info.position.generation:
            return
        self._is_overtaken = True
        log.warning("checkpoint.overtaken", url=info.url, newest=newest)
        if self._overtaken is not None:
            self._overtaken(newest)


def _lower_priority() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)  # of this thread alone


# Host memory that snapshots are copied to, used again and again.

COPIERS = 2
"""Threads that copy: two take little more than half the time of one, from where on memory is the limit."""


class HostBuffers:
    """Memory for one snapshot. The first copy asks the system for it; later ones of the same arrays find it there."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, np.ndarray]] = {}

    def reserve(self, arrays: Arrays) -> None:
        """Have room for arrays like these; they are not read."""
        for rooms in self._rooms_for(arrays).values():
            for room in rooms.values():
                np.copyto(room, np.zeros((), room.dtype))  # the system gives memory when it is written to

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with arrays of its own, valid until the next copy."""
        self._rooms_for(snapshot.arrays)
        pairs = [
            (self._kept[group][name], array)
            for group, arrays in snapshot.arrays.items()
            for name, array in arrays.items()
        ]
        pairs.sort(key=lambda pair: -pair[1].nbytes)
        with ThreadPoolExecutor(COPIERS) as pool:
            list(pool.map(_copy_arrays, [pairs[first::COPIERS] for first in range(COPIERS)]))
        return msgspec.structs.replace(snapshot, arrays=self._kept)

    def _rooms_for(self, arrays: Arrays) -> dict[str, dict[str, np.ndarray]]:
        self._kept = {
            group: {name: _buffer_for(array, self._kept.get(group, {}).get(name)) for name, array in held.items()}
            for group, held in arrays.items()
        }
        return self._kept


def _buffer_for(array: np.ndarray, kept: np.ndarray | None) -> np.ndarray:
    if kept is not None and (kept.shape, kept.dtype) == (array.shape, array.dtype):
        return kept
    return np.empty(array.shape, array.dtype)


def _copy_arrays(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for room, array in pairs:
        np.copyto(room, array)
