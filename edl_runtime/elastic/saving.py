"""When rank 0 writes a checkpoint, whom it tells, and what a training begins with."""

from __future__ import annotations

import time
from collections.abc import Callable

from edl_runtime.checkpoint.manifest import CheckpointInfo, position_of
from edl_runtime.checkpoint.schedule import Schedule
from edl_runtime.checkpoint.snapshot import Arrays, Snapshot
from edl_runtime.checkpoint.store import CheckpointStore, Restored
from edl_runtime.checkpoint.tensors import check_types
from edl_runtime.checkpoint.writer import CheckpointWriter
from edl_runtime.elastic.link import Link
from edl_runtime.elastic.messages import Note, Saved, Unsaved
from edl_runtime.errors import CheckpointStoreError, EdlError
from edl_runtime.log import get_logger
from edl_runtime.specs import Checkpoint

CLOSE_LIMIT_S = 60.0
"""How long the end of a training waits for a checkpoint that is being written."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""How long a store that is away is left alone before it is asked again: twice as long each time."""

MOST_TOLD = 3
"""Damaged checkpoints that are named when a training goes back behind them."""

log = get_logger(__name__)

Capture = Callable[[], Snapshot]


class Saver:
    """The checkpoints of a training whose `spec` says where and when; none without one.

    Raises CheckpointStoreError if nothing can be written there.
    """

    def __init__(self, spec: Checkpoint | None, link: Link) -> None:
        self._spec = spec
        self._link = link
        self._store = None if spec is None else CheckpointStore(spec, answered=link.moved)
        self._writer: CheckpointWriter | None = None
        self._schedule: Schedule | None = None
        self._found: Restored | None = None
        if self._store is not None:
            self._store.check()

    @property
    def keeps(self) -> bool:
        """Whether checkpoints are kept."""
        return self._store is not None

    def seen(self) -> int:
        """Return the highest generation that any checkpoint is of, be it damaged or unfinished; 0 for none."""
        newest = [] if self._store is None else self._store.names()[:1]
        return position_of(newest[0]).generation if newest else 0

    def newest(self) -> Restored | None:
        """Return the newest that is whole. Raises as `CheckpointStore.load_newest`.

        It is kept until `begin`, and not read again as long as it is the newest.
        """
        self._found = None if self._store is None else self._store.load_newest(self._found)
        return self._found

    def tell_passed_by(self, found: Restored) -> None:
        """Say that a training goes back to this one, if newer ones are damaged: what they hold is trained again.

        So is what one of an earlier generation holds that is further on: somebody has trained beside it, most likely.
        """
        if found.further:
            step, at = found.info.manifest.step, found.further.manifest.step
            text = (
                f"training goes on from step {step} though {found.further.url} is of step {at}: it is of an earlier "
                "generation, so another training has likely written here at the same time. It stays until this one "
                f"has come to step {at}; to go on from it, stop this one and remove those of later generations"
            )
            self._link.say(Note(text=text))
        if found.passed_by:
            what = "; ".join(map(str, found.passed_by[:MOST_TOLD]))
            more = len(found.passed_by) - MOST_TOLD
            rest = f"; and {more} more" if more > 0 else ""
            place = found.info.url.rpartition("/")[0]
            text = (
                f"training goes back to step {found.info.manifest.step}: {what}{rest}. See `edl checkpoints ls {place}`"
            )
            self._link.say(Note(text=text))

    def begin(self, step: int, unsaved_s: float) -> None:
        """Count from this step when checkpoints are due, `unsaved_s` after the last; go on if that has been begun.

        Each rank counts, so that whoever is the first in a later generation goes on where the one before was.
        """
        self._found = None
        if self._spec is not None and self._schedule is None:
            self._schedule = Schedule(self._spec, step=step, now=time.monotonic() - unsaved_s)

    def unsaved_s(self) -> float:
        """Return how long ago the last checkpoint was due."""
        return 0.0 if self._schedule is None else self._schedule.age_s(time.monotonic())

    def due(self, step: int) -> bool:
        """Whether it is time for a checkpoint after this step, which all ranks ask once."""
        return self._schedule is not None and self._schedule.due(step, time.monotonic())

    def prepare(self, arrays: Callable[[], Arrays]) -> None:
        """Be quick when this rank is to `save` such arrays. Raises SpecError for a type that checkpoints can't hold."""
        if self._store is not None and self._writer is None:
            held = arrays()
            for group in held.values():
                check_types(group.items())
            self._the_writer(self._store).prepare(held)

    def save(self, capture: Capture) -> None:
        """Begin to write a checkpoint, unless the one before is still being written."""
        if self._store is not None:
            self._the_writer(self._store).save(capture)

    def save_now(self, capture: Capture, patience_s: float = 0.0) -> str:
        """Write a checkpoint, return its URL; "" where none are kept.

        A store that can't be used is asked again and again for `patience_s`; the agent is told once. Raises
        CheckpointError.
        """
        if self._store is None:
            return ""
        until, pause_s = time.monotonic() + patience_s, FIRST_PAUSE_S
        while True:
            try:
                return self._the_writer(self._store).save_now(capture).url
            except CheckpointStoreError as error:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise
                if pause_s == FIRST_PAUSE_S:
                    self._tell_unsaved(capture().step, error, patience_s)
            self._link.moved()  # who waits for this rank may do so: it has the weights
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def close(self) -> None:
        """Wait for what is being written."""
        if self._writer is not None:
            self._writer.close(CLOSE_LIMIT_S)

    def _the_writer(self, store: CheckpointStore) -> CheckpointWriter:
        if self._writer is None:
            self._writer = CheckpointWriter(
                store, saved=self._tell_saved, failed=self._tell_failed, overtaken=self._tell_overtaken
            )
        return self._writer

    def _tell_saved(self, info: CheckpointInfo, took_s: float) -> None:
        manifest = info.manifest
        self._link.say(
            Saved(
                generation=manifest.generation,
                step=manifest.step,
                epoch=manifest.epoch,
                url=info.url,
                took_s=took_s,
                created_at=manifest.created_at,
                metrics=manifest.metrics,
            )
        )

    def _tell_failed(self, error: EdlError) -> None:
        self._link.say(Note(text=f"a checkpoint could not be written: {error}"))

    def _tell_unsaved(self, step: int, error: CheckpointStoreError, for_s: float) -> None:
        log.warning("checkpoint.tried_again", url=error.url, step=step, cause=error.cause, for_s=for_s)
        self._link.say(Unsaved(step=step, reason=str(error), for_s=for_s))

    def _tell_overtaken(self, newest: str) -> None:
        text = (
            f"{newest} is of a later generation than the checkpoint that was just written beside it: another training "
            "writes there, or this one goes on without this instance. Later ones count as newer, whatever their step, "
            "and the next run goes on from them; give each training a place of its own (EDL_CHECKPOINT)"
        )
        self._link.say(Note(text=text))
