"""When rank 0 writes a checkpoint, and whom it tells."""

from __future__ import annotations

import time
from collections.abc import Callable

from edl_runtime.checkpoint.manifest import CheckpointInfo, position_of
from edl_runtime.checkpoint.schedule import Schedule
from edl_runtime.checkpoint.snapshot import Arrays, Snapshot
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.checkpoint.writer import CheckpointWriter
from edl_runtime.elastic.link import Link
from edl_runtime.elastic.messages import Note, Saved
from edl_runtime.errors import EdlError
from edl_runtime.specs import Checkpoint

CLOSE_LIMIT_S = 60.0
"""How long the end of a training waits for a checkpoint that is being written."""

Capture = Callable[[], Snapshot]


class Saver:
    """The checkpoints of a training whose `spec` says where and when; none without one.

    Raises CheckpointStoreError if nothing can be written there.
    """

    def __init__(self, spec: Checkpoint | None, link: Link) -> None:
        self._spec = spec
        self._link = link
        self._store = None if spec is None else CheckpointStore(spec)
        self._writer: CheckpointWriter | None = None
        self._schedule: Schedule | None = None
        if self._store is not None:
            self._store.check()

    def seen(self) -> int:
        """Return the highest generation that any checkpoint is of, be it damaged or unfinished; 0 for none."""
        newest = [] if self._store is None else self._store.names()[:1]
        return position_of(newest[0]).generation if newest else 0

    def newest(self) -> tuple[CheckpointInfo, Snapshot] | None:
        """Return the newest that is whole, and what it holds. Raises as `CheckpointStore.load_newest`."""
        return None if self._store is None else self._store.load_newest()

    def begin(self, step: int, arrays: Callable[[], Arrays]) -> None:
        """Be the one that writes, from this step on. `arrays`: such as checkpoints will have."""
        if self._spec is None or self._store is None:
            return
        self._schedule = Schedule(self._spec, step=step, now=time.monotonic())
        if self._writer is None:
            self._writer = CheckpointWriter(self._store, saved=self._tell_saved, failed=self._tell_failed)
            self._writer.prepare(arrays())

    def save_if_due(self, step: int, capture: Capture) -> None:
        """Begin to write a checkpoint if it is time; only where `begin` was called."""
        if self._writer is not None and self._schedule is not None and self._schedule.due(step, time.monotonic()):
            self._writer.save(capture)

    def save_now(self, capture: Capture) -> str:
        """Write a checkpoint, return its URL; "" where none are kept. Raises CheckpointError."""
        if self._store is None:
            return ""
        if self._writer is None:
            self._writer = CheckpointWriter(self._store, saved=self._tell_saved, failed=self._tell_failed)
        return self._writer.save_now(capture).url

    def close(self) -> None:
        """Wait for what is being written."""
        if self._writer is not None:
            self._writer.close(CLOSE_LIMIT_S)

    def _tell_saved(self, info: CheckpointInfo, took_s: float) -> None:
        manifest = info.manifest
        self._link.say(
            Saved(
                generation=manifest.generation,
                step=manifest.step,
                epoch=manifest.epoch,
                url=info.url,
                took_s=took_s,
                metrics=manifest.metrics,
            )
        )

    def _tell_failed(self, error: EdlError) -> None:
        self._link.say(Note(text=f"a checkpoint could not be written: {error}"))
