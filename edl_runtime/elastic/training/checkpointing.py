"""When rank 0 writes checkpoints, what a training starts from, and its end: last checkpoint and result."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Literal

from edl_runtime.checkpoint.errors import CheckpointStoreError
from edl_runtime.checkpoint.file_format import Arrays, CheckpointInfo, Snapshot, check_types, position_of
from edl_runtime.checkpoint.store import CheckpointStore, RestoredCheckpoint
from edl_runtime.checkpoint.writer import CheckpointWriter
from edl_runtime.elastic.comm.agent_client import AgentClient
from edl_runtime.elastic.comm.agent_protocol import (
    CheckpointDelayed,
    CheckpointSaved,
    Note,
    ScriptFailed,
    WorkerFinished,
)
from edl_runtime.elastic.comm.process_group import GroupSession
from edl_runtime.elastic.training.train_state import TrainState
from edl_runtime.errors import EdlError
from edl_runtime.log import get_logger
from edl_runtime.result import write_result
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Checkpoint

CLOSE_LIMIT_S = 60.0
"""How long the end of a training waits for a checkpoint that is being written."""

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
"""How long a store that is away is left alone before it is asked again: twice as long each time."""

MAX_NAMED = 3
"""Damaged checkpoints that are named when a training goes back behind them."""

log = get_logger(__name__)

Capture = Callable[[], Snapshot]


class CheckpointManager:
    """The checkpoints of a training whose `spec` says where and when; none without one.

    Raises CheckpointStoreError if nothing can be written there.
    """

    def __init__(self, spec: Checkpoint | None, agent: AgentClient) -> None:
        self._spec = spec
        self._agent = agent
        self._store = None if spec is None else CheckpointStore(spec, answered=agent.note_progress)
        self._writer: CheckpointWriter | None = None
        self._schedule: CheckpointSchedule | None = None
        self._found: RestoredCheckpoint | None = None
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

    def newest(self) -> RestoredCheckpoint | None:
        """Return the newest that is whole. Raises as `CheckpointStore.load_newest`.

        It is kept until `begin`, and not read again as long as it is the newest.
        """
        self._found = None if self._store is None else self._store.load_newest(self._found)
        return self._found

    def report_skipped(self, found: RestoredCheckpoint) -> None:
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
            self._agent.send(Note(text=text))
        if found.skipped:
            what = "; ".join(map(str, found.skipped[:MAX_NAMED]))
            more = len(found.skipped) - MAX_NAMED
            rest = f"; and {more} more" if more > 0 else ""
            place = found.info.url.rpartition("/")[0]
            text = (
                f"training goes back to step {found.info.manifest.step}: {what}{rest}. See `edl checkpoints ls {place}`"
            )
            self._agent.send(Note(text=text))

    def begin(self, step: int, unsaved_s: float) -> None:
        """Count from this step when checkpoints are due, `unsaved_s` after the last; go on if that has been begun.

        Each rank counts, so that whoever is the first in a later generation goes on where the one before was.
        """
        self._found = None
        if self._spec is not None and self._schedule is None:
            self._schedule = CheckpointSchedule(self._spec, step=step, now=time.monotonic() - unsaved_s)

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
            self._get_writer(self._store).prepare(held)

    def save(self, capture: Capture) -> None:
        """Begin to write a checkpoint, unless the one before is still being written."""
        if self._store is not None:
            self._get_writer(self._store).save(capture)

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
                return self._get_writer(self._store).save_now(capture).url
            except CheckpointStoreError as error:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise
                if pause_s == FIRST_PAUSE_S:
                    self._report_delayed(capture().step, error, patience_s)
            self._agent.note_progress()  # who waits for this rank may do so: it has the weights
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def close(self) -> None:
        """Wait for what is being written."""
        if self._writer is not None:
            self._writer.close(CLOSE_LIMIT_S)

    def _get_writer(self, store: CheckpointStore) -> CheckpointWriter:
        if self._writer is None:
            self._writer = CheckpointWriter(
                store, saved=self._report_saved, failed=self._report_failed, overtaken=self._report_overtaken
            )
        return self._writer

    def _report_saved(self, info: CheckpointInfo, took_s: float) -> None:
        manifest = info.manifest
        self._agent.send(
            CheckpointSaved(
                generation=manifest.generation,
                step=manifest.step,
                epoch=manifest.epoch,
                url=info.url,
                took_s=took_s,
                created_at=manifest.created_at,
                metrics=manifest.metrics,
            )
        )

    def _report_failed(self, error: EdlError) -> None:
        self._agent.send(Note(text=f"a checkpoint could not be written: {error}"))

    def _report_delayed(self, step: int, error: CheckpointStoreError, for_s: float) -> None:
        log.warning("checkpoint.tried_again", url=error.url, step=step, cause=error.cause, for_s=for_s)
        self._agent.send(CheckpointDelayed(step=step, reason=str(error), for_s=for_s))

    def _report_overtaken(self, newest: str) -> None:
        text = (
            f"{newest} is of a later generation than the checkpoint that was just written beside it: another training "
            "writes there, or this one goes on without this instance. Later ones count as newer, whatever their step, "
            "and the next run goes on from them; give each training a place of its own (EDL_CHECKPOINT)"
        )
        self._agent.send(Note(text=text))


# When the next checkpoint is due.


class CheckpointSchedule:
    """Tells at each step whether a checkpoint is due, counted from `step` at the time `now`.

    By steps one is due at each multiple of `every_steps`, by time when `every_s` have passed. Pure: `now` is a reading
    of any clock that only goes forward, in seconds.
    """

    def __init__(self, spec: Checkpoint, *, step: int, now: float) -> None:
        self._every_steps = spec.every_steps
        self._every_s = spec.every_s
        self._step = step
        self._at = now

    def due(self, step: int, now: float) -> bool:
        """Whether one is due after `step`. If so, the next is counted from here, however this one fares."""
        by_steps = self._every_steps is not None and step // self._every_steps > self._step // self._every_steps
        by_time = self._every_s is not None and now - self._at >= self._every_s
        if by_steps or by_time:
            self.begin(step, now)
        return by_steps or by_time

    def age_s(self, now: float) -> float:
        """Return how long ago the last one was due."""
        return now - self._at

    def begin(self, step: int, now: float) -> None:
        """Count from here: a checkpoint was loaded, or written out of turn."""
        self._step, self._at = step, now


# How a training ends: its last checkpoint, its result, and what becomes of it where a script leaves its loop early.

LAST_CHECKPOINT_WAIT_S = 600.0
"""How long the last checkpoint of what is all trained is tried to be written: nothing else has these weights."""

LEAVE_GRACE_SHARE = 0.5
"""What of an instance's grace it tries so where it was told to leave; after 0.8 of it its agent kills it."""

LINGER_S = 0.2
"""How long the sockets stay open after the last step: who is slower may not have read all that it needs from them."""


class TrainingEnd:
    """The end of a training, of which there is one. `over`: it has come."""

    def __init__(
        self, train_state: TrainState, session: GroupSession, checkpoints: CheckpointManager, settings: RuntimeSettings
    ) -> None:
        self.over = False
        self._train_state = train_state
        self._session = session
        self._checkpoints = checkpoints
        self._settings = settings
        self._result_url: str | None = None

    @property
    def saved(self) -> bool:
        """Whether this process has written the last checkpoint, or would have, where any are kept."""
        return self._result_url is not None

    def save(self, *, leaves: bool = False) -> None:
        """Write the last checkpoint and the result, unless this process has; wait for a store that is away.

        `leaves`: since this instance was told to, so its time is short. Raises CheckpointError.
        """
        if not self.saved:
            patience_s = LEAVE_GRACE_SHARE * self._settings.grace_s if leaves else LAST_CHECKPOINT_WAIT_S
            self._result_url = self._checkpoints.save_now(partial(self._train_state.snapshot, durable=True), patience_s)
            self.write_result()

    def end(self, why: Literal["done", "left"]) -> None:
        """Let go of the group and tell the agent."""
        self.over = True
        group = self._session.group
        if group.world_size > 1:
            time.sleep(LINGER_S)
        group.close()
        self._checkpoints.close()
        self._session.agent.send(WorkerFinished(step=self._train_state.steps, why=why))

    def write_result(self) -> None:
        """Leave the checkpoint's place and the metrics for whoever runs this script."""
        metrics = self._train_state.reported_metrics()
        write_result(checkpoint=self._result_url or "", metrics=metrics, settings=self._settings)


def at_script_end(agent: AgentClient, end: Callable[[], None]) -> None:
    """Call `end` once the script has run to its end, and not into an error.

    If that raises an error, the agent is told and this process ends with status 1. By `atexit` it would be too late:
    what connects to object stores can't begin any work by then.
    """
    threading._register_atexit(_end_in_process, os.getpid(), agent, end)  # type: ignore[attr-defined] # noqa: SLF001


def _end_in_process(process: int, agent: AgentClient, end: Callable[[], None]) -> None:
    """Do it, but not in the processes that load data, which end in the same way."""
    if os.getpid() != process or agent.failed or getattr(sys, "last_value", None) is not None:
        return
    try:
        end()
    except SystemExit:  # it was told to leave, and has
        return
    except BaseException as error:  # noqa: BLE001 -- the last to hear of it; and only so can the status be changed
        traceback.print_exception(error)
        agent.send(ScriptFailed.of(error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
