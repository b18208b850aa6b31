"""When rank 0 writes checkpoints, what a training starts from, and its end: last checkpoint and result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec

from edl_runtime.checkpoint.background_writer import Capture, CheckpointWriter
from edl_runtime.checkpoint.errors import CheckpointStoreError, UnreadableCheckpointError
from edl_runtime.checkpoint.file_format import Arrays, CheckpointInfo, check_types, position_of
from edl_runtime.checkpoint.store import CheckpointStore, RestoredCheckpoint
from edl_runtime.elastic.comm.agent_protocol import (
    AgentClient,
    CheckpointDelayed,
    CheckpointSaved,
    Note,
    SaveCheckpoint,
    WorkerFinished,
)
from edl_runtime.elastic.comm.process_group import GroupSession
from edl_runtime.elastic.training.train_state import TrainState
from edl_runtime.log import get_logger
from edl_runtime.result import write_result
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Checkpoint

CLOSE_LIMIT_S = 60.0
"""How long the end of a training waits for a checkpoint that is being written."""

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
"""Pauses between tries to write to a store that is unavailable, doubled each time."""

MOST_SEARCHED = 10
"""How many of the newest checkpoints are searched for one that answers a request."""

MAX_NAMED = 3
"""Damaged checkpoints that a note lists when a training restarts from an older one."""

log = get_logger(__name__)


class CheckpointManager:
    """Writes and loads the checkpoints of a training; does nothing without a `spec`.

    Raises CheckpointStoreError if nothing can be written there.
    """

    def __init__(self, spec: Checkpoint | None, agent: AgentClient) -> None:
        self._spec = spec
        self._agent = agent
        self._store: CheckpointStore | None = None
        self._writer: CheckpointWriter | None = None
        self._schedule: CheckpointSchedule | None = None
        self._found: RestoredCheckpoint | None = None
        self._is_prepared = False
        self._begun_request = 0
        self._unanswered = 0  # a request whose checkpoint is being written
        if spec is not None:
            self._store = CheckpointStore(spec, answered=agent.note_progress)
            self._store.check()
            self._writer = CheckpointWriter(self._store, saved=self._report_saved, notify=self._notify)

    @property
    def kept(self) -> bool:
        """Whether there is a place for checkpoints."""
        return self._store is not None

    def highest_generation(self) -> int:
        """Return the highest generation of any checkpoint, damaged and unfinished ones included; 0 without any."""
        newest = [] if self._store is None else self._store.names()[:1]
        return position_of(newest[0]).generation if newest else 0

    def newest(self) -> RestoredCheckpoint | None:
        """Return the newest complete checkpoint, cached until `begin`. Raises as `CheckpointStore.load_newest`."""
        self._found = None if self._store is None else self._store.load_newest(self._found)
        return self._found

    def report_skipped(self, found: RestoredCheckpoint) -> None:
        """Note in the job's events why a training does not continue from its newest checkpoint, if so.

        Newer ones are damaged or not finite, or one of an earlier generation is of a later step: then another training
        has most likely written to the same location.
        """
        step = found.info.manifest.step
        if found.further:
            at = found.further.manifest.step
            self._notify(
                f"training continues from step {step} though {found.further.url} is of step {at}: it is of an earlier "
                "generation, so another training has probably written here at the same time. It is kept until this one "
                f"reaches step {at}; to continue from it, stop this training and remove those of later generations"
            )
        if found.skipped:
            what = "; ".join(map(str, found.skipped[:MAX_NAMED]))
            more = len(found.skipped) - MAX_NAMED
            rest = f"; and {more} more" if more > 0 else ""
            folder = found.info.url.rpartition("/")[0]
            self._notify(f"training goes back to step {step}: {what}{rest}. See `edl checkpoints ls {folder}`")

    def begin(self, step: int, unsaved_s: float) -> None:
        """Start the schedule at this step, `unsaved_s` after the last checkpoint, unless it runs already.

        Each rank has a schedule, so that whichever writes in a later generation continues it.
        """
        self._found = None
        if self._spec is not None and self._schedule is None:
            self._schedule = CheckpointSchedule(self._spec, step=step, now=time.monotonic() - unsaved_s)

    def unsaved_s(self) -> float:
        """Return how long ago the last checkpoint was due."""
        return 0.0 if self._schedule is None else self._schedule.age_s(time.monotonic())

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step, by this rank's clock."""
        return self._schedule is not None and self._schedule.due(step, time.monotonic())

    def note_due(self, step: int) -> None:
        """Note that one is due after this step. Each rank calls it, whoever writes it, and even if it can't."""
        if self._schedule is not None:
            self._schedule.restart(step, time.monotonic())

    def prepare(self, arrays: Callable[[], Arrays]) -> None:
        """Allocate what `save` needs for such arrays. Raises SpecError for a type that checkpoints can't hold."""
        if self._writer is not None and not self._is_prepared:
            self._is_prepared = True
            held = arrays()
            for group in held.values():
                check_types(group.items())
            self._writer.prepare(held)

    @property
    def is_requested(self) -> bool:
        """Whether a checkpoint was requested and can begin: one that is being written is waited for."""
        return self._open_request is not None and self._writer is not None and self._writer.wait(0)

    def save(self, capture: Capture, *, generation: int = 0) -> None:
        """Start writing a checkpoint, unless the one before is still being written. `generation`: the current one.

        It answers the last request. If a worker of an earlier generation had that request, and has written a checkpoint
        for it before it was lost, that one is reported instead.
        """
        if self._writer is None:
            return
        asked = self._open_request
        if asked is None or not self._writer.wait(0):
            self._writer.save(capture)
            return
        self._begun_request = asked.request
        if found := None if asked.asked_in == generation else self._find_answer(asked.request):
            self._report_saved(found, 0.0)
            return
        self._unanswered = asked.request
        self._writer.save(lambda: msgspec.structs.replace(capture(), request=asked.request))

    def save_now(self, capture: Capture, patience_s: float = 0.0) -> str:
        """Write a checkpoint and return its URL, "" without checkpoints.

        Retries for `patience_s` while the store is unavailable, and reports that once. Raises CheckpointError.
        """
        if self._writer is None:
            return ""
        until, pause_s = time.monotonic() + patience_s, FIRST_PAUSE_S
        while True:
            try:
                return self._save_now(self._writer, capture).url
            except CheckpointStoreError as error:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise
                if pause_s == FIRST_PAUSE_S:
                    step = capture().step
                    log.warning("checkpoint.delayed", url=error.url, step=step, cause=error.cause, for_s=patience_s)
                    self._agent.send(CheckpointDelayed(step=step, reason=error.finding, for_s=patience_s))
            self._agent.note_progress()  # so that it is not killed as hung: it has the weights
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _save_now(self, writer: CheckpointWriter, capture: Capture) -> CheckpointInfo:
        request = self._open_request.request if self._open_request else 0
        info = writer.save_now(lambda: msgspec.structs.replace(capture(), request=request))
        if request and info.manifest.request != request:  # it was written before, of the same step
            self._report_saved(info, 0.0, request)
        self._begun_request = max(self._begun_request, request)
        return info

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._writer is not None:
            self._writer.close(CLOSE_LIMIT_S)

    @property
    def _open_request(self) -> SaveCheckpoint | None:
        """The agent's last request, unless a checkpoint for it was begun."""
        asked = self._agent.checkpoint_request
        return asked if asked and asked.request > self._begun_request else None

    def _find_answer(self, request: int) -> CheckpointInfo | None:
        """Return the checkpoint that was written for this request, None if there is none."""
        if self._store is None:
            return None
        try:
            for name in self._store.names()[:MOST_SEARCHED]:
                with contextlib.suppress(UnreadableCheckpointError):
                    info = self._store.info(name)
                    if info.manifest.request == request:
                        return info
        except CheckpointStoreError as error:
            log.warning("checkpoint.not_searched", url=error.url, cause=error.cause)
        return None

    def _notify(self, text: str) -> None:
        request, self._unanswered = self._unanswered, 0
        self._agent.send(Note(text=text, request=request))

    def _report_saved(self, info: CheckpointInfo, took_s: float, request: int = 0) -> None:
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
                request=request or manifest.request,
            )
        )
        self._unanswered = 0


class CheckpointSchedule:
    """When checkpoints are due: at each multiple of `every_steps`, and whenever `every_s` have passed. Pure.

    `now` is a reading of a monotonic clock, in seconds.
    """

    def __init__(self, spec: Checkpoint, *, step: int, now: float) -> None:
        self._every_steps = spec.every_steps
        self._every_s = spec.every_s
        self._step = step
        self._at = now

    def due(self, step: int, now: float) -> bool:
        """Whether one is due after `step`."""
        by_steps = self._every_steps is not None and step // self._every_steps > self._step // self._every_steps
        by_time = self._every_s is not None and now - self._at >= self._every_s
        return by_steps or by_time

    def restart(self, step: int, now: float) -> None:
        """Count to the next one from here."""
        self._step, self._at = step, now

    def age_s(self, now: float) -> float:
        """Return how long ago the last one was due."""
        return now - self._at


# The end of a training: last checkpoint and result

LAST_CHECKPOINT_WAIT_S = 600.0
"""How long the last checkpoint of a finished training is retried: nothing else has these weights."""

LEAVE_GRACE_SHARE = 0.5
"""Share of an instance's grace for retries when it was told to leave; at 0.8 of it the agent kills the worker."""

LINGER_S = 0.2
"""How long sockets stay open after the last step: slower ranks may not have read everything from them."""


class TrainingEnd:
    """Ends a training, once. `over`: it has ended."""

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
        """Whether this process has written the last checkpoint, if there are any."""
        return self._result_url is not None

    def save(self, *, leaves: bool = False) -> None:
        """Write the last checkpoint and the result, once; retry while the store is unavailable.

        `leaves`: this instance was told to leave, so its time is short. Raises CheckpointError.
        """
        if not self.saved:
            patience_s = LEAVE_GRACE_SHARE * self._settings.grace_s if leaves else LAST_CHECKPOINT_WAIT_S
            self._result_url = self._checkpoints.save_now(partial(self._train_state.snapshot, durable=True), patience_s)
            self.write_result()

    def end(self, why: Literal["done", "left"]) -> None:
        """Close the group and report the end to the agent."""
        self.over = True
        group = self._session.group
        if group.world_size > 1:
            time.sleep(LINGER_S)
        group.close()
        self._checkpoints.close()
        self._session.agent.send(WorkerFinished(step=self._train_state.steps, why=why))

    def write_result(self) -> None:
        """Publish the checkpoint's URL, the metrics, and what is not finite, as the job's result."""
        write_result(
            checkpoint=self._result_url or "",
            metrics=self._train_state.reported_metrics(),
            not_finite=self._train_state.not_finite,
            settings=self._settings,
        )
