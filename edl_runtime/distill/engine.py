"""The running part of a reader: its threads, and who waits for whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable
from functools import partial
from typing import Any

import structlog

from edl_runtime.distill.discovery import follow_pool
from edl_runtime.distill.epoch import Epoch
from edl_runtime.distill.feeds import Plan
from edl_runtime.distill.formats import Format, cut, pieces
from edl_runtime.distill.loop import LoopThread
from edl_runtime.distill.patience import TELL_EVERY_S, Patience
from edl_runtime.distill.pipeline import Pipeline
from edl_runtime.distill.pool import Connect, TeacherPool
from edl_runtime.distill.teachers import Discovered, Fixed
from edl_runtime.errors import DistillError
from edl_runtime.settings import RuntimeSettings

CLOSE_LIMIT_S = 5.0
"""How long closing waits for threads. Only a source that does not return, or a silent network, keeps one longer."""

LOOK_EVERY_S = 0.2
"""How often a new epoch, while it waits for the source, looks whether it is still wanted."""

log = structlog.get_logger(__name__)


class Engine:
    """Feeder, lanes and discovery of one reader. Holds no reference to that, so one that nobody closes is collected."""

    def __init__(
        self,
        source: Callable[[], Iterable[Any]],
        *,
        inputs: tuple[str | None, ...],
        outputs: tuple[str, ...],
        format: Format,  # noqa: A002 -- as the reader has it
        teachers: Fixed | Discovered,
        teacher_batch_size: int,
        settings: RuntimeSettings,
        connect: Connect,
    ) -> None:
        self._source = source
        self._format: Format = format
        self._size = teacher_batch_size
        self._teachers = teachers
        self._settings = settings
        self._plan_of = partial(Plan.of, inputs, outputs)
        self.pipeline = Pipeline(
            Patience(str(teachers), wait_limit_s=settings.teacher_wait_s, request_limit_s=settings.teacher_timeout_s)
        )
        self._pool = TeacherPool(self.pipeline, connect, self._plan_of)
        self._discovery: LoopThread | None = None
        self._feeder: threading.Thread | None = None
        self._source_free = threading.Lock()
        self._lock = threading.RLock()  # reentrant: the garbage collector may stop it from inside
        self._started = False
        self._closed = False

    def start(self) -> bool:
        """Start to look for teachers; return whether this is the first time. Raises DistillError when stopped."""
        with self._lock:
            if self._closed:
                raise DistillError("this reader is closed")
            if self._started:
                return False
            self._started = True
            if isinstance(self._teachers, Discovered):
                self._discovery = LoopThread("edl discovery", partial(self._discover, self._teachers))
                self._discovery.start()
            else:
                self._pool.use(self._teachers.addresses)
            return True

    def begin(self) -> Epoch:
        """Start an epoch and the thread that feeds it."""
        epoch = self.pipeline.begin()
        self._feeder = threading.Thread(target=self._feed, args=(epoch,), name="edl feeder", daemon=True)
        self._feeder.start()
        return epoch

    def stop(self) -> None:
        """Let all threads end, for good; doesn't wait for them."""
        with self._lock:
            self._closed = True
            self.pipeline.close()
            if self._discovery is not None:
                self._discovery.stop()
            self._pool.stop()

    def join(self) -> None:
        """Wait for the threads to end after `stop`, for `CLOSE_LIMIT_S` at most."""
        until = time.monotonic() + CLOSE_LIMIT_S
        self._pool.join(until)
        if self._discovery is not None:
            self._discovery.join(until - time.monotonic())
        if self._feeder is not None and self._feeder is not threading.current_thread():
            self._feeder.join(max(0.0, until - time.monotonic()))
            if self._feeder.is_alive():
                log.warning("source.still_busy", waited_s=CLOSE_LIMIT_S)

    async def _discover(self, wish: Discovered) -> None:
        try:
            await follow_pool(wish, self._settings, self._use)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the training script has to know
            self.pipeline.fail(error)

    def _use(self, addresses: Collection[str]) -> None:
        self._pool.use(addresses)
        if not addresses:
            self.pipeline.lacks("no teacher is registered")

    def _feed(self, epoch: Epoch) -> None:
        if not self._await_source(epoch):
            return
        try:
            self._put_all(epoch)
        except BaseException as error:  # noqa: BLE001 -- it is the training script's to handle
            self.pipeline.end_of_source(epoch, error)
        else:
            self.pipeline.end_of_source(epoch, None)
        finally:
            self._source_free.release()

    def _await_source(self, epoch: Epoch) -> bool:
        """Take the source, which is never run by two threads at once; False when the epoch is over before."""
        since = told_at = time.monotonic()
        while not self._source_free.acquire(timeout=LOOK_EVERY_S):
            if not self.pipeline.goes_on(epoch):
                return False
            if time.monotonic() - told_at >= TELL_EVERY_S:
                told_at = time.monotonic()
                log.warning("source.still_busy", waited_s=round(told_at - since, 1))
        return True

    def _put_all(self, epoch: Epoch) -> None:
        plan: Plan | None = None
        first = 0
        items = iter(self._source())
        try:
            for piece in pieces(self._format, items, self._size):
                if plan is None:
                    signature = self.pipeline.await_signature(epoch)
                    if signature is None:
                        return
                    plan = self._plan_of(signature)
                batch, requests = cut(self._format, piece, plan, self._size, first)
                first += batch.samples if self._format == "sample" else 1
                if not self.pipeline.put(epoch, batch, requests):
                    return
        finally:
            if isinstance(items, Generator):
                items.close()  # here, in the thread that runs it, and not when somebody happens to forget it
