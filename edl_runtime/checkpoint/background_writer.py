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
"""By how much the writer's threads lower their priority."""

log = get_logger(__name__)

Capture = Callable[[], Snapshot]


class CheckpointWriter:
    """Writes checkpoints to a store in a thread, one at a time, and prunes the store.

    `saved` is called with each stored checkpoint and how many seconds it took; `notify` with a text for the job's owner
    when one that is written in the background fails, and once when there is one of a later generation, and when one has
    weights that are not finite. Both are called in the thread that writes. Use it from one thread, and `close` it.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        saved: Callable[[CheckpointInfo, float], object] = lambda _info, _took_s: None,
        notify: Callable[[str], object] = lambda _text: None,
    ) -> None:
        self._store = store
        self._saved = saved
        self._notify = notify
        self._is_overtaken = self._is_marked = False
        self._buffers = HostBuffers()
        self._preparing: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._last: CheckpointInfo | None = None

    def prepare(self, arrays: Arrays) -> None:
        """Allocate the memory to which `save` copies such arrays, so that the first one is as fast as the others.

        In the background, once: for 200 MB it takes 0.2 s, and several seconds on a busy machine.
        """
        self._preparing = threading.Thread(target=self._reserve, args=(arrays,), name="edl-checkpoint", daemon=True)
        self._preparing.start()

    def save(self, capture: Capture) -> bool:
        """Copy what `capture` returns, which may be views of memory that changes, and write it in the background.

        While the last one is still being written, it skips this one: it returns False without calling `capture`, so
        that training does not wait. Later errors are logged and notified, and not raised.
        """
        if not self.wait(0):
            log.warning("checkpoint.skipped", url=self._store.spec.url, reason="the last one is still being written")
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

        If that one has the same step and metrics, return it instead. Raises CheckpointError.
        """
        self.wait()
        snapshot, last = capture(), self._last
        position = CheckpointPosition(snapshot.generation, snapshot.step)
        if last is not None and (last.position, last.manifest.metrics) == (position, snapshot.metrics):
            return last
        return self._write(snapshot)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being written; return False if that takes more than `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait as `wait`, and free the memory. An unfinished checkpoint is lost when the process ends."""
        self._buffers = HostBuffers()
        return self.wait(timeout_s)

    def _reserve(self, arrays: Arrays) -> None:
        _lower_priority()
        self._buffers.reserve(arrays)

    def _write_aside(self, snapshot: Snapshot) -> None:
        _lower_priority()
        try:
            self._write(snapshot)
        except Exception as error:  # noqa: BLE001 -- whatever it is, who has requested the checkpoint waits for an answer
            self._notify(f"a checkpoint could not be written: {_cause(error)}")

    def _write(self, snapshot: Snapshot) -> CheckpointInfo:
        try:
            return self._store_and_report(snapshot)
        except Exception as error:
            log.warning("checkpoint.failed", generation=snapshot.generation, step=snapshot.step, cause=_cause(error))
            raise

    def _store_and_report(self, snapshot: Snapshot) -> CheckpointInfo:
        began = time.monotonic()
        info = self._store.write(snapshot)
        took_s = time.monotonic() - began
        self._last = info
        log.info("checkpoint.saved", url=info.url, size_mb=info.size_bytes / 1e6, took_s=took_s)
        self._saved(info, took_s)
        self._check_finite(info)
        try:
            self._check_overtaken(info)
            self._store.prune()
        except CheckpointError as error:
            log.warning("checkpoint.not_pruned", cause=str(error))
        return info

    def _check_finite(self, info: CheckpointInfo) -> None:
        """Notify once if its weights are not finite."""
        if info.defect and not self._is_marked:
            log.warning("checkpoint.not_finite", url=info.url, defect=info.defect)
            self._notify(
                f"{info.name} has {info.defect}: it is marked, and runs continue from the last one before; see "
                f"`edl checkpoints ls {self._store.spec.url}`"
            )
        self._is_marked = bool(info.defect)

    def _check_overtaken(self, info: CheckpointInfo) -> None:
        """Notify once if there is a checkpoint of a later generation."""
        newest = next(iter(self._store.names()), info.name)
        if self._is_overtaken or position_of(newest).generation <= info.position.generation:
            return
        self._is_overtaken = True
        log.warning("checkpoint.overtaken", url=info.url, newest=newest)
        self._notify(
            f"{newest} is of a later generation than the checkpoint that was just written beside it: another training "
            "writes there, or this one continues without this instance. Later generations count as newer, whatever "
            "their step, and the next run starts from them; give each training its own location (EDL_CHECKPOINT)"
        )


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, EdlError) else f"{type(error).__name__}: {error}"


def _lower_priority() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)  # of this thread alone


# Memory that snapshots are copied to, and that is reused.

COPIERS = 2
"""Threads that copy: two take little more than half the time of one; with more, memory is the limit."""


class HostBuffers:
    """Memory for one snapshot. The first copy allocates it; later ones of the same arrays reuse it."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, np.ndarray]] = {}

    def reserve(self, arrays: Arrays) -> None:
        """Allocate memory for arrays like these, which are not read."""
        for rooms in self._rooms_for(arrays).values():
            for room in rooms.values():
                np.copyto(room, np.zeros((), room.dtype))  # a page is allocated when it is first written to

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
