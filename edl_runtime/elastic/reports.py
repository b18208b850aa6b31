"""What an agent tells the rest of the world of its trainer: progress, checkpoints and notes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from edl_runtime import progress
from edl_runtime.checkpoint import landed
from edl_runtime.elastic.events import Event
from edl_runtime.elastic.membership import Membership
from edl_runtime.elastic.messages import Note, Saved, Unsaved
from edl_runtime.errors import RegistryUnavailableError
from edl_runtime.log import get_logger
from edl_runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from redis.asyncio import Redis

PROGRESS_EVERY_S = 1.0

RETRY_AFTER_S = 1.0

MOST_WAITING = 1000
"""So much is kept to be told while Redis is away; then the oldest is forgotten."""

log = get_logger(__name__)


class Reports:
    """Tells Redis, in order and as soon as it can be told; whoever reports never waits. `run` it in a task."""

    def __init__(self, client: Redis, settings: RuntimeSettings, membership: Membership) -> None:
        self._client = client
        self._settings = settings
        self._membership = membership
        self._waiting: deque[Event | landed.Landed | Unsaved] = deque(maxlen=MOST_WAITING)
        self._failed = False  # to hear whether the first that waits has been told
        self._progress: progress.Progress | None = None
        self._news = asyncio.Event()
        self._telling = asyncio.Lock()

    def tell(self, said: Saved | Unsaved | Note) -> None:
        """Pass on what the trainer said."""
        self._waiting.extend(self._parts(said))
        self._news.set()

    def show(self, report: progress.Progress | None) -> None:
        """Have this be the job's progress."""
        self._progress = report
        self._news.set()

    async def run(self) -> None:
        """Tell until cancelled."""
        shown_at = 0.0
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._tell_all()
                if self._progress and time.monotonic() >= shown_at + PROGRESS_EVERY_S:
                    shown_at = time.monotonic()
                    await self._show()
            except RegistryUnavailableError:  # the agent's loop says so
                await asyncio.sleep(RETRY_AFTER_S)
                self._news.set()

    async def finish(self) -> None:
        """Tell what is left, if Redis can be told."""
        try:
            await self._tell_all()
            await self._show()
        except RegistryUnavailableError as error:
            log.warning("reports.lost", cause=str(error))

    async def newest_checkpoint(self) -> str:
        """Return in words which checkpoint of the job landed last, of whichever run or instance."""
        try:
            await self._tell_all()
            return await self._newest()
        except RegistryUnavailableError:
            return "which one landed last is not known, for Redis is away"

    async def _newest(self) -> str:
        job = self._settings.job
        newest = await landed.newest(self._client, self._settings.namespace, self._stream, job=job)
        return f"the last that landed is of step {newest.step}, {newest.url}" if newest else "none has landed before"

    @property
    def _stream(self) -> str:
        return self._settings.checkpoint_stream or self._settings.job

    async def _tell_all(self) -> None:
        async with self._telling:
            while self._waiting:
                try:
                    await self._tell(self._waiting[0], again=self._failed)
                except RegistryUnavailableError:
                    self._failed = True
                    raise
                self._failed = False
                self._waiting.popleft()

    async def _tell(self, what: Event | landed.Landed | Unsaved, *, again: bool) -> None:
        """Tell it once, also where nobody answered when it was told before."""
        if isinstance(what, Unsaved):
            keeps = f"this instance keeps the weights of step {what.step} and tries again for {what.for_s:.0f} s"
            text = f"the last checkpoint can't be written: {what.reason}; {keeps}; {await self._newest()}"
            what = Event(kind="note", instance=self._settings.instance, reason=text)
        if isinstance(what, Event):
            await self._membership.announce(what)
            return
        if again and await landed.newest(self._client, self._settings.namespace, self._stream) == what:
            return
        await landed.publish(self._client, self._settings.namespace, self._stream, what)

    def _parts(self, said: Saved | Unsaved | Note) -> list[Event | landed.Landed | Unsaved]:
        instance = self._settings.instance
        if isinstance(said, Unsaved):
            return [said]
        if isinstance(said, Note):
            return [Event(kind="note", instance=instance, reason=said.text)]
        event = Event(
            kind="saved",
            instance=instance,
            generation=said.generation,
            step=said.step,
            epoch=said.epoch,
            url=said.url,
            total_s=said.took_s,
            metrics=said.metrics,
        )
        checkpoint = landed.Landed(
            job=self._settings.job,
            step=said.step,
            epoch=said.epoch,
            generation=said.generation,
            url=said.url,
            at=said.created_at,
            metrics=said.metrics,
        )
        return [event, checkpoint]

    async def _show(self) -> None:
        report, self._progress = self._progress, None
        if report:
            report = msgspec.structs.replace(report, run=self._settings.run)
            await progress.publish(self._client, self._settings.namespace, self._settings.job, report)
