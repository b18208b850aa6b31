"""What the agent reports to Redis about its worker: events, checkpoints, notes, and the job's progress."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from edl_runtime.checkpoint import checkpoint_events
from edl_runtime.elastic.comm.agent_protocol import CheckpointDelayed, CheckpointSaved, Note, StepDone
from edl_runtime.elastic.rendezvous.redis_store import Event, RendezvousStore
from edl_runtime.log import get_logger
from edl_runtime.progress import Progress, publish_progress
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.errors import MalformedRecordError, RegistryUnavailableError

if TYPE_CHECKING:
    from redis.asyncio import Redis

PROGRESS_EVERY_S = 1.0
RETRY_AFTER_S = 1.0  # while Redis is away

LATE_S = 1.0
"""What is published so long after it happened says so."""

MAX_QUEUED = 1000
"""Reports that are kept while Redis is unavailable; then the oldest is dropped."""

log = get_logger(__name__)


_Part = Event | checkpoint_events.SavedCheckpoint | CheckpointDelayed


class _Report(NamedTuple):
    """What is to be published, `since` a time of the monotonic clock."""

    what: _Part
    since: float


class StatusReporter:
    """Publishes reports to Redis, in order; `report` never waits. `run` it in a task."""

    def __init__(self, client: Redis, settings: RuntimeSettings, store: RendezvousStore) -> None:
        self._client = client
        self._settings = settings
        self._store = store
        self._waiting: deque[_Report] = deque(maxlen=MAX_QUEUED)
        self._failed = False  # whether the first of the queue may have been published without an answer
        self._progress: Progress | None = None
        self._news = asyncio.Event()
        self._sending = asyncio.Lock()

    def report(self, update: CheckpointSaved | CheckpointDelayed | Note) -> None:
        """Queue an update of the worker."""
        now = time.monotonic()
        self._waiting.extend(_Report(part, now) for part in self._parts(update))
        self._news.set()

    def set_progress(self, report: Progress | None) -> None:
        """Set the job's progress."""
        self._progress = report
        self._news.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        shown_at = 0.0
        damaged = False
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                if self._progress and time.monotonic() >= shown_at + PROGRESS_EVERY_S:
                    shown_at = time.monotonic()
                    await self._send_progress()
                await self._send_queued()
                damaged = False
            except RegistryUnavailableError as error:  # the agent's loop logs that Redis is away
                if isinstance(error, MalformedRecordError) and not damaged:
                    log.warning("reports.delayed", cause=str(error))
                damaged = isinstance(error, MalformedRecordError)
                await asyncio.sleep(RETRY_AFTER_S)
                self._news.set()

    async def finish(self) -> None:
        """Publish what is left, if Redis answers."""
        try:
            await self._send_queued()
            await self._send_progress()
        except RegistryUnavailableError as error:
            log.warning("reports.dropped", cause=str(error))

    async def newest_checkpoint(self) -> str:
        """Return which checkpoint of the job was written last, in any run and by any instance, for people."""
        try:
            await self._send_queued()
            return await self._newest()
        except RegistryUnavailableError as error:
            return f"the last checkpoint is not known: {error}"

    async def _newest(self) -> str:
        job = self._settings.job
        newest = await checkpoint_events.newest(self._client, self._settings.namespace, self._stream, job=job)
        return f"the last checkpoint is of step {newest.step}, {newest.url}" if newest else "there is no checkpoint"

    @property
    def _stream(self) -> str:
        return self._settings.checkpoint_stream or self._settings.job

    async def _send_queued(self) -> None:
        async with self._sending:
            while self._waiting:
                try:
                    await self._send(self._waiting[0], again=self._failed)
                except RegistryUnavailableError:
                    self._failed = True
                    raise
                self._failed = False
                self._waiting.popleft()

    async def _send(self, report: _Report, *, again: bool) -> None:
        """Publish once, also where an earlier try was not answered."""
        what = report.what
        if isinstance(what, CheckpointDelayed):
            keeps = f"this instance keeps the weights of step {what.step} and tries again for {what.for_s:.0f} s"
            text = f"the last checkpoint can't be written: {what.reason}; {keeps}; {await self._newest()}"
            what = Event(kind="note", instance=self._settings.instance, reason=text)
        if isinstance(what, Event):
            late_s = time.monotonic() - report.since
            await self._store.announce(msgspec.structs.replace(what, delay_s=late_s if late_s >= LATE_S else 0.0))
            return
        if again and await checkpoint_events.newest(self._client, self._settings.namespace, self._stream) == what:
            return
        await checkpoint_events.publish(self._client, self._settings.namespace, self._stream, what)

    def _parts(self, update: CheckpointSaved | CheckpointDelayed | Note) -> list[_Part]:
        instance = self._settings.instance
        if isinstance(update, CheckpointDelayed):
            return [update]
        if isinstance(update, Note):
            return [Event(kind="note", instance=instance, reason=update.text, request=update.request)]
        event = Event(
            kind="saved",
            instance=instance,
            generation=update.generation,
            step=update.step,
            epoch=update.epoch,
            url=update.url,
            total_s=update.took_s,
            metrics=update.metrics,
            request=update.request,
        )
        checkpoint = checkpoint_events.SavedCheckpoint(
            job=self._settings.job,
            step=update.step,
            epoch=update.epoch,
            generation=update.generation,
            url=update.url,
            at=update.created_at,
            metrics=update.metrics,
        )
        return [event, checkpoint]

    async def _send_progress(self) -> None:
        report, self._progress = self._progress, None
        if report:
            report = msgspec.structs.replace(report, run=self._settings.run)
            await publish_progress(self._client, self._settings.namespace, self._settings.job, report)


RATE_WINDOW_S = 10.0
"""Samples per second are measured over so long."""


class StepMeter:
    """How far and how fast an instance's workers train, from their StepDone updates. Pure.

    - `step`, `generation`: of the last finished step, 0 before the first.
    - `pause_s`: between the last step before that generation, in generation `paused_in`, and the first in it; None
      without one before.
    """

    def __init__(self) -> None:
        self.step = 0
        self.generation = 0
        self.pause_s: float | None = None
        self.paused_in = 0
        self._last: StepDone | None = None
        self._took_s: deque[float] = deque(maxlen=20)
        self._computed_s: deque[float] = deque(maxlen=20)  # without the wait for other ranks; of this generation
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, done: StepDone) -> None:
        last = self._last
        if last and done.generation > last.generation:
            self.pause_s, self.paused_in = done.clock_s - last.clock_s, last.generation
            self._computed_s.clear()
        elif last and done.step > last.step:
            took_s, steps = done.clock_s - last.clock_s, done.step - last.step
            self._took_s.append(took_s / steps)
            self._computed_s.append(max(0.0, took_s - (done.waited_s - last.waited_s)) / steps)
        if last and done.samples < last.samples:  # restarted from a checkpoint
            self._samples.clear()
        self._samples.append((done.clock_s, done.samples))
        while self._samples[0][0] < done.clock_s - RATE_WINDOW_S:
            self._samples.popleft()
        self.step, self.generation, self._last = done.step, done.generation, done

    @property
    def median_s(self) -> float:
        """Median time of a step, 0 while unknown."""
        return statistics.median(self._took_s) if self._took_s else 0.0

    @property
    def compute_s(self) -> float:
        """Median time that a step of this generation has taken without the wait for other ranks, 0 while unknown."""
        return statistics.median(self._computed_s) if self._computed_s else 0.0

    def progress(self, *, instances: int, generation: int) -> Progress | None:
        """Return the report of the whole job, None before the first step."""
        last = self._last
        if last is None:
            return None
        (begin, before), (end, after) = self._samples[0], self._samples[-1]
        left = last.total_steps - last.step if last.total_steps is not None else None
        return Progress(
            step=last.step,
            updated_at=last.at,
            total_steps=last.total_steps,
            epoch=last.epoch,
            loss=last.loss,
            metrics=last.metrics,
            samples_per_s=(after - before) / (end - begin) if end > begin else 0.0,
            step_s=self.median_s,
            time_left_s=left * self.median_s if left is not None and self._took_s else None,
            instances=instances,
            generation=generation,
        )
