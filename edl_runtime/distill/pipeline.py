"""Between the source, the teachers and the training script: a bounded window of requests, delivered in order.

Three kinds of threads use it. The feeder puts batches in, in order, and waits for room. Workers take requests and
deliver the answers (see `Dispatcher`). The training script takes whole batches in the order of the source.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from edl_runtime.distill.batching import Batch, ItemAccumulator, Request
from edl_runtime.distill.discovery import PoolCounts
from edl_runtime.distill.dispatch_policy import AnswerTimeout, SourceWait
from edl_runtime.distill.dispatcher import Dispatcher, PipelineSignals
from edl_runtime.distill.errors import DistillError
from edl_runtime.distill.stats import DeliveryCounter, ReaderStats
from edl_runtime.protocol.oip import ModelSignature

MIN_REQUESTS = 4

MAX_EPOCHS_AHEAD = 8
"""Epochs that are fed ahead of the one that is read: many short ones fit the window, and any number of empty ones."""

FLUSH_AFTER_S = 0.02
"""How long a script waits for the source before it flushes the items that are held for a larger piece."""


@dataclass(slots=True, eq=False, repr=False)
class Epoch:
    """One pass over the source: the batches that were put in and not yet taken, in order.

    - `awaited`: the script waits for its next batch.
    - `ended`: no batch will be added; `error`: what the source raised, to raise after the batches before it.
    - `accumulator`: holds the items that are not requested yet, while it is fed.
    - `over`: the script has left it, at its end or before.
    """

    batches: deque[Batch] = field(default_factory=deque)
    awaited: bool = False
    ended: bool = False
    error: BaseException | None = None
    accumulator: ItemAccumulator | None = None
    over: bool = False
    waits_for_signature: bool = False

    def drop(self) -> int:
        """End it; return the weight of the batches that will not be taken."""
        self.over = True
        weight = 0
        for batch in self.batches:
            batch.dropped = True
            weight += batch.weight
        self.batches.clear()
        return weight


class Pipeline:
    """The batches of one reader. Every method is safe from any thread.

    The window is counted in requests; an item of the source is put in whole, even if its requests exceed the window.

    - `timeouts`: one for each pool.
    - `epochs`: how many the script will read, if that is known: these may be fed ahead of it.
    """

    def __init__(self, timeouts: Sequence[AnswerTimeout], epochs: int | None = None) -> None:
        lock = threading.RLock()  # reentrant: the garbage collector may close the reader from inside
        self._lock = lock
        self._signals = PipelineSignals(lock, self._begin_watch, self._split)
        self._room = self._signals.room
        self._done = self._signals.done
        self._request_sent = threading.Condition(lock)  # wakes the thread that hedges
        self._watching = True
        self._known_epochs = epochs or 0
        self._turns = count()  # of batches
        self._begun = 0  # epochs that are fed or were
        self._unfinished = 0  # weight of the batches between put and take_batch
        self._reading: Epoch | None = None
        self._ahead: deque[Epoch] = deque()  # the epochs after it that are fed already
        self._source_wait = SourceWait()
        self._failure: BaseException | None = None
        self._closed = False
        self._flushes = False
        self._counter = DeliveryCounter(time.monotonic())
        self._waited_s = [0.0] * len(timeouts)  # for each pool's teachers
        self.dispatchers = tuple(Dispatcher(self._signals, timeout) for timeout in timeouts)

    # Called by the training script

    def begin(self) -> tuple[Epoch, bool]:
        """Return the next epoch, and whether it is being fed already; the one before is over, finished or not.

        Raises DistillError when closed.
        """
        with self._lock:
            self._check()
            self._drop_reading()
            self._counter.begin_epoch(time.monotonic())
            is_fed = bool(self._ahead)
            self._reading = self._ahead.popleft() if is_fed else self._new_epoch()
            self._room.notify_all()
            return self._reading, is_fed

    def end(self, epoch: Epoch) -> None:
        """Drop the rest of the epoch, with its unanswered requests."""
        if epoch.over:  # at interpreter exit a thread that was killed may hold the lock
            return
        with self._lock:
            if epoch is self._reading:
                self._drop_reading()

    def take_batch(self, epoch: Epoch) -> Batch | None:
        """Wait for the next batch and return it with its answers, None at the epoch's end.

        Raises the source's error or a request's failure in place of their batch; NoTeacherError; the error given to
        `fail`; DistillError when the reader was closed or another epoch was begun.
        """
        with self._lock:
            if not self._has_next(epoch):
                self._await_batch(epoch)
            if not epoch.batches:
                return None
            batch = epoch.batches.popleft()
            self._unfinished -= batch.weight
            self._counter.deliver(
                batch.samples, batch.answered_by, time.monotonic(), batches=len(batch.items), cached=batch.cached
            )
            self._room.notify()
            return batch

    def _has_next(self, epoch: Epoch) -> bool:
        """Whether there is a batch or the end to return; raises an error instead if there is one."""
        self._check()
        if epoch is not self._reading:
            raise DistillError("this epoch is over: the reader was iterated again; use one iteration at a time")
        if epoch.batches:
            batch = epoch.batches[0]
            if batch.failure is not None:
                raise batch.failure
            return not batch.missing
        if epoch.ended and epoch.error is not None:
            raise epoch.error
        return epoch.ended

    def _await_batch(self, epoch: Epoch) -> None:
        since = time.monotonic()
        self._counter.begin_wait("teachers" if epoch.batches or epoch.waits_for_signature else "source", since)
        try:
            while not self._has_next(epoch):
                self._await_next(epoch, time.monotonic(), since)
        finally:
            now = time.monotonic()
            self._waited_s = self._waited_for_pools_s(now)
            self._counter.end_wait(now)

    def _await_next(self, epoch: Epoch, now: float, waiting_since: float) -> None:
        """Wait once, until something may have changed. Raises NoTeacherError."""
        if epoch.batches:
            epoch.batches[0].awaited = True
            late = [pool for number, pool in enumerate(self.dispatchers) if epoch.batches[0].awaits(number)]
        else:
            late = [pool for pool in self.dispatchers if epoch.waits_for_signature and pool.signature is None]
        pauses = [pool.pause_s(now, waiting_since) for pool in late] or [self._source_wait.pause_s(now, waiting_since)]
        epoch.awaited = True
        accumulator = epoch.accumulator
        is_holding_back = accumulator is not None and accumulator.is_holding_back and not late
        self._done.wait(min([*pauses, FLUSH_AFTER_S] if is_holding_back else pauses))
        if is_holding_back and accumulator is not None and not epoch.batches:
            self._flush(epoch, accumulator)
        epoch.awaited = False

    def _flush(self, epoch: Epoch, accumulator: ItemAccumulator) -> None:
        """Request the items that are held, even without room in the window: only this thread could make room.

        An error ends the epoch, as it would in the feeder.
        """
        self._flushes = True  # `put` must not wait for this thread
        try:
            accumulator.flush()
        except Exception as error:  # noqa: BLE001 - raised in the training script after the batches before it
            epoch.ended, epoch.error = True, error
        finally:
            self._flushes = False

    # Called by the feeder

    @property
    def most_rows(self) -> int:
        """Most rows that a request should have, for models whose answers don't depend on that."""
        return min(pool.most_rows for pool in self.dispatchers)

    def put(self, epoch: Epoch, batch: Batch, requests: Sequence[Sequence[Request]]) -> bool:
        """Wait for room and add a batch and its requests to each pool; False when the epoch takes no more."""
        with self._lock:
            while not epoch.over and not self._flushes and self._unfinished >= self._window():
                self._room.wait()
            if epoch.over or epoch.ended:
                return False
            batch.awaited = epoch.awaited and not epoch.batches
            batch.turn = (next(self._turns),)
            epoch.batches.append(batch)
            self._unfinished += batch.weight
            now = time.monotonic()
            if batch.awaited:
                self._counter.await_teachers(now)
            for dispatcher, of_pool in zip(self.dispatchers, requests, strict=True):
                dispatcher.enqueue(of_pool, now)
            if batch.awaited and not (batch.missing and all(pool.connected for pool in self.dispatchers)):
                self._done.notify()
            return True

    def _split(self, failed: Request) -> bool:
        """Replace the batch of a failed request by parts of the usual size; False if it is not larger than that."""
        batch = failed.batch
        if batch.split is None:
            return False
        epoch = next(one for one in [self._reading, *self._ahead] if one is not None and batch in one.batches)
        position = epoch.batches.index(batch)
        del epoch.batches[position]
        batch.dropped = True
        self._unfinished -= batch.weight
        now = time.monotonic()
        for number, (part, requests) in enumerate(batch.split()):
            part.turn = (*batch.turn, number)
            epoch.batches.insert(position + number, part)
            self._unfinished += part.weight
            for one in requests[failed.pool] if failed.deaths else ():
                one.deaths, one.hedged = failed.deaths, True
            for dispatcher, of_pool in zip(self.dispatchers, requests, strict=True):
                dispatcher.enqueue(of_pool, now)
        self._done.notify_all()
        return True

    def await_signatures(self, epoch: Epoch) -> list[ModelSignature] | None:
        """Wait for the model signature of each pool and return them; None when the epoch is over."""
        with self._lock:
            epoch.waits_for_signature = True
            now = time.monotonic()
            if epoch.awaited:
                self._counter.await_teachers(now)
            for pool in self.dispatchers:
                pool.timeout.restart(now)
            self._done.notify()
            while True:
                signatures = [pool.signature for pool in self.dispatchers if pool.signature is not None]
                if epoch.over or len(signatures) == len(self.dispatchers):
                    break
                self._room.wait()
            epoch.waits_for_signature = False
            return None if epoch.over else signatures

    def end_of_source(self, epoch: Epoch, error: BaseException | None, *, ahead: bool) -> Epoch | None:
        """End the epoch after its last batch, because the source ended or raised `error`.

        Return the next epoch, if the script will read it and it may be fed now, `ahead` of the script.
        """
        with self._lock:
            epoch.ended = True
            epoch.error = epoch.error or error
            self._done.notify_all()
            if epoch.error is not None or epoch.over or not ahead:
                return None
            begun = self._begun
            while len(self._ahead) >= MAX_EPOCHS_AHEAD and not self._closed:
                self._room.wait()
            if self._closed or self._begun != begun or begun >= self._known_epochs:
                return None
            following = self._new_epoch()
            self._ahead.append(following)
            return following

    # Run by the thread that hedges

    def watch(self) -> None:
        """Send slow requests to a second teacher; runs until closed."""
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                pauses = [pause_s for pool in self.dispatchers if (pause_s := pool.hedge(now)) is not None]
                self._watching = bool(pauses)
                self._request_sent.wait(min(pauses, default=None))

    def _begin_watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._request_sent.notify()

    # Called by any thread

    def fail(self, failure: BaseException) -> None:
        """Raise `failure` in the training script from now on."""
        with self._lock:
            self._failure = self._failure or failure
            self._done.notify_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._drop_reading()
            while self._ahead:
                self._drop(self._ahead.popleft())
            for dispatcher in self.dispatchers:
                dispatcher.wake_workers()
            self._request_sent.notify()

    def stats(self, quarantined: Mapping[str, str]) -> ReaderStats:
        """Return the reader's counts; `quarantined` are its teachers in quarantine, address → reason."""
        with self._lock:
            return self._counter.stats(self.dispatchers, quarantined, time.monotonic())

    def pool_counts(self, number: int) -> PoolCounts:
        dispatcher = self.dispatchers[number]
        with self._lock:
            now = time.monotonic()
            return PoolCounts(
                connected=dispatcher.connected,
                in_flight=len(dispatcher.in_flight),
                queued=dispatcher.queued,
                waited_s=self._waited_for_pools_s(now)[number],
                asked_s=dispatcher.asked_s(now),
                batches=self._counter.batches,
                samples=self._counter.samples,
            )

    def _waited_for_pools_s(self, now: float) -> list[float]:
        """Return how long the script has waited for each pool's teachers, including the current wait.

        Each pool's share of a wait ends when it has answered all its requests of the batch.
        """
        since = self._counter.teachers_awaited_since
        epoch = self._reading
        if since is None or epoch is None:
            return self._waited_s
        if epoch.batches:
            batch = epoch.batches[0]
            until = [now if batch.awaits(pool) else at for pool, at in enumerate(batch.answered_at)]
        else:
            until = [now if pool.signature is None else since for pool in self.dispatchers]
        return [before + max(0.0, at - since) for before, at in zip(self._waited_s, until, strict=True)]

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise DistillError("this reader is closed")

    def _window(self) -> int:
        return max(MIN_REQUESTS, sum(pool.window for pool in self.dispatchers))

    def _new_epoch(self) -> Epoch:
        self._begun += 1
        return Epoch()

    def _drop_reading(self) -> None:
        if self._reading is not None:
            self._drop(self._reading)
            self._reading = None

    def _drop(self, epoch: Epoch) -> None:
        self._unfinished -= epoch.drop()
        for dispatcher in self.dispatchers:
            dispatcher.drop_settled()
        self._room.notify_all()
        self._done.notify_all()
