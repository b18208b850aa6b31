"""Publishes the job's progress to Redis about once a second and logs it every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Self

from edl_runtime.distill.bottleneck import ProgressRates
from edl_runtime.distill.event_loop_thread import EventLoopThread
from edl_runtime.distill.stats import ReaderStats, StatsOfReaders
from edl_runtime.log import get_logger
from edl_runtime.progress import LIMIT_LOGGED_AS, LOGGED_AS, Progress, publish_progress, publish_reader_progress
from edl_runtime.protocol.oip import positive_integer
from edl_runtime.settings import AGENT_FD, RuntimeSettings
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect

if TYPE_CHECKING:
    from redis.asyncio import Redis

PUBLISH_EVERY_S = 1.0
LOG_EVERY_S = 5.0
LAST_REPORT_LIMIT_S = 1.0
"""Time limit of the last report; Redis may be unavailable by then."""
JOIN_LIMIT_S = 2.0
LONGEST_REASON = 200
"""Most characters of why a teacher is in quarantine; a teacher's error message may have any length."""

log = get_logger(__name__)


class JobReporter:
    """Reports a job's progress while it trains, in a thread of its own; training never waits for it.

    A reader makes one by itself. Make your own, as a context manager, to report phases without teachers or several
    readers one after the other as one job, and give it to each reader: steps add up.

    - `total_steps`: batches to train in all; without it no time left is reported.
    - `settings`: by default from the environment. Without a job's name and Redis only the log is written.
    """

    def __init__(self, *, total_steps: int | None = None, settings: RuntimeSettings | None = None) -> None:
        """Raise SpecError for an invalid `total_steps`. Starts nothing yet."""
        self._total_steps = (
            None if total_steps is None else positive_integer("total_steps", total_steps, ", or None if not known")
        )
        self._settings = settings or RuntimeSettings.from_env(os.environ)
        self._lock = threading.RLock()  # reentrant: the garbage collector may stop it from inside
        self._steps = 0
        self._samples = 0
        self._epoch: int | None = None
        self._loss: float | None = None
        self._metrics: dict[str, float] = {}
        self._note = ""
        self._readers = StatsOfReaders()
        self._rates = ProgressRates(time.monotonic())
        self._thread: EventLoopThread | None = None
        self._closed = False
        self._dropping = False
        self._has_agent = AGENT_FD in os.environ

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def advance(self, samples: int) -> None:
        """Note that a batch of so many `samples` was trained. Readers that have this reporter do it themselves."""
        self._start()
        with self._lock:
            self._steps += 1
            self._samples += samples

    def report(
        self,
        *,
        loss: float | None = None,
        note: str | None = None,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Set what is reported from now on; None leaves a value unchanged, as do `metrics` those of other names.

        `loss`: the last step's. `epoch`: counted as the script does. `note`: what is done now, in your words.
        """
        self._start()
        with self._lock:
            self._loss = self._loss if loss is None else float(loss)
            self._note = self._note if note is None else note
            self._epoch = self._epoch if epoch is None else epoch
            self._metrics |= {name: float(value) for name, value in (metrics or {}).items()}

    def follow(self, stats: Callable[[], ReaderStats]) -> None:
        """Include the counts of a reader, which `stats` returns."""
        self._readers.add(stats)
        self._start()

    def unfollow(self, stats: Callable[[], ReaderStats]) -> None:
        """Keep the final counts of a reader, and release the reader; `stats` as given to `follow`."""
        self._readers.remove(stats)

    def stats(self) -> ReaderStats:
        return self._readers.stats()

    def progress(self) -> Progress:
        with self._lock:
            reading = self.stats()
            steps = self._steps + reading.batches
            samples = self._samples + reading.samples
            rates = self._rates.update(steps=steps, samples=samples, reading=reading, now=time.monotonic())
            return Progress(
                step=steps,
                updated_at=time.time(),
                total_steps=self._total_steps,
                epoch=reading.epoch if self._epoch is None else self._epoch,
                loss=self._loss,
                metrics=dict(self._metrics),
                samples_per_s=rates.samples_per_s,
                teachers=reading.teachers,
                answered=reading.answered,
                shares=rates.shares,
                cached=reading.cached,
                waiting=rates.waiting,
                busy=rates.busy,
                queued=reading.queued,
                retries=reading.retries,
                hedges=reading.hedges,
                quarantined={
                    teacher: " ".join(reason.split())[:LONGEST_REASON]
                    for teacher, reason in reading.quarantined.items()
                },
                limit=rates.limit,
                time_left_s=self._time_left_s(steps, rates.steps_per_s),
                note=self._note,
            )

    def stop(self) -> None:
        """Publish a last report, then stop; doesn't wait."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._thread.stop()

    def close(self) -> None:
        """Publish a last report and stop; waits for `JOIN_LIMIT_S` at most."""
        self.stop()
        if self._thread is not None:
            self._thread.join(JOIN_LIMIT_S)

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._closed:
                return
            self._rates = ProgressRates(time.monotonic())
            self._thread = EventLoopThread("edl reporter", self._report)
        self._thread.start()

    def _time_left_s(self, steps: int, steps_per_s: float) -> float | None:
        if self._total_steps is None or not steps_per_s:
            return None
        return max(0, self._total_steps - steps) / steps_per_s

    async def _report(self) -> None:
        with contextlib.ExitStack() as shown:
            self._show_metrics(shown)
            if not (self._settings.job and self._settings.redis_url):
                await self._report_until_stopped(None)
                return
            async with connect(self._settings.redis_url) as client:
                await self._report_until_stopped(client)

    def _show_metrics(self, shown: contextlib.ExitStack) -> None:
        """Serve metrics to Prometheus until `shown` closes, if a port is set and free."""
        port = self._settings.metrics_port
        if not port:
            return
        from edl_runtime.distill.metrics import HOST, metrics_endpoint

        try:
            endpoint = metrics_endpoint(port)
        except OSError as error:
            log.warning(
                "metrics.not_shown", address=f"{HOST}:{port}", cause=error.strerror, variable="EDL_METRICS_PORT"
            )
            return
        endpoint.add(self.stats)
        shown.callback(endpoint.remove, self.stats)
        log.info("metrics.shown", url=f"http://{HOST}:{port}/metrics")

    async def _report_until_stopped(self, client: Redis | None) -> None:
        logged_at, logged_step, logged_limit = time.monotonic(), 0, ""
        try:
            while True:
                progress = await self._publish(client)
                if progress.step > logged_step and time.monotonic() - logged_at >= LOG_EVERY_S:
                    log.info(LOGGED_AS, job=self._settings.job, progress=progress.line())
                    logged_at, logged_step = time.monotonic(), progress.step
                if progress.limit not in ("", logged_limit):
                    log.info(LIMIT_LOGGED_AS, job=self._settings.job, verdict=progress.verdict())
                    logged_limit = progress.limit
                await asyncio.sleep(PUBLISH_EVERY_S)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_REPORT_LIMIT_S):
                    await self._publish(client)

    async def _publish(self, client: Redis | None) -> Progress:
        progress, settings = self.progress(), self._settings
        if client is None:
            return progress
        try:
            if self._has_agent:  # which publishes the job's own report
                await publish_reader_progress(
                    client, settings.namespace, settings.job, progress, run=settings.run, instance=settings.instance
                )
            else:
                await publish_progress(client, settings.namespace, settings.job, progress)
            self._dropping = False
        except RegistryUnavailableError as error:
            if not self._dropping:
                log.warning("progress.dropped", job=settings.job, address=error.address, cause=error.cause)
            self._dropping = True
        return progress
