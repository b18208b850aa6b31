"""Between the source, the teachers and the training script: a bounded window of requests, delivered in order.

Three kinds of threads meet here. The feeder puts batches in, in order, and waits for room. A lane, one of a teacher's
connections, takes one request at a time and brings the answers, or gives it back when the teacher fails: then it is
the next to be taken. The training script takes whole batches in the order of the source.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque

import structlog

from edl_runtime.distill.batches import Batch, Request
from edl_runtime.distill.feeds import Answers
from edl_runtime.distill.stats import Meter, ReaderStats
from edl_runtime.errors import DistillError, NoTeacherError
from edl_runtime.protocol.oip import ModelSignature

REQUESTS_A_LANE = 2
"""One that is being answered and one that waits, so that a lane never waits for the source."""

LEAST_REQUESTS = 4
TELL_EVERY_S = 5.0

log = structlog.get_logger(__name__)


class Epoch:
    """One pass over the source: the batches that were put in and not yet taken, in order."""

    __slots__ = ("batches", "ended", "error", "failure", "waits_for_signature")

    def __init__(self) -> None:
        self.batches: deque[Batch] = deque()
        self.ended = False
        self.error: BaseException | None = None  # of the source; raised after the batches before it
        self.failure: BaseException | None = None  # of a request; raised at once
        self.waits_for_signature = False


class Lane:
    """What the pipeline knows of one connection: its teacher, and what that is asked at the moment."""

    __slots__ = ("address", "asked", "leaving")

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked: Request | None = None
        self.leaving = False


class Pipeline:
    """The requests of one reader. Every method is safe from any thread.

    - `whom`: the teachers, in words, for messages.
    - `wait_limit_s`: how long `take_batch` waits while there is no teacher.
    """

    def __init__(self, whom: str, *, wait_limit_s: float) -> None:
        self._whom = whom
        self._wait_limit_s = wait_limit_s
        lock = threading.RLock()  # reentrant: the garbage collector may close the reader from inside
        self._lock = lock
        self._work = threading.Condition(lock)  # for lanes
        self._room = threading.Condition(lock)  # for the feeder
        self._done = threading.Condition(lock)  # for the training script
        self._todo: deque[Request] = deque()
        self._unfinished = 0  # requests between put and take_batch
        self._epoch: Epoch | None = None
        self._lanes: Counter[str] = Counter()
        self._signature: ModelSignature | None = None
        self._lacking_since: float | None = time.monotonic()  # no teacher since then; None once one has answered
        self._trouble = ""
        self._failure: BaseException | None = None
        self._closed = False
        self._epochs = 0
        self._batches = 0
        self._samples = 0
        self._answered: Counter[str] = Counter()
        self._meter = Meter(time.monotonic())

    # The training script

    def begin(self) -> Epoch:
        """Start the next epoch; the one before is over, finished or not. Raises DistillError when closed."""
        with self._lock:
            self._check()
            self._drop_epoch()
            self._epoch = Epoch()
            self._epochs += 1
            return self._epoch

    def end(self, epoch: Epoch) -> None:
        """Be done with the epoch: what is left of it is dropped, answers that are under way included."""
        with self._lock:
            if epoch is self._epoch:
                self._drop_epoch()

    def take_batch(self, epoch: Epoch) -> Batch | None:
        """Return the next batch with its answers, None at the epoch's end; wait for it as long as there are teachers.

        Raises what the source raised, when its turn has come; NoTeacherError; whatever `fail` was given; DistillError
        when the reader was closed or another epoch was begun.
        """
        with self._lock:
            waits_since = time.monotonic()
            tell_at = waits_since + min(TELL_EVERY_S, self._wait_limit_s / 2)
            while True:
                self._check()
                if epoch is not self._epoch:
                    raise DistillError("this epoch is over: the reader was iterated anew; use one iteration at a time")
                if epoch.failure is not None:
                    raise epoch.failure
                if epoch.batches and not epoch.batches[0].missing:
                    return self._delivered(epoch.batches.popleft())
                if epoch.ended and not epoch.batches:
                    if epoch.error is not None:
                        raise epoch.error
                    return None
                if self._lacking_since is None or self._lanes or not (epoch.batches or epoch.waits_for_signature):
                    self._done.wait()
                    continue
                now = time.monotonic()
                waited_s = now - max(waits_since, self._lacking_since)
                if waited_s >= self._wait_limit_s:
                    raise NoTeacherError(self._whom, waited_s, self._trouble)
                if now >= tell_at:
                    limit_s, cause = self._wait_limit_s, self._trouble
                    log.warning(
                        "teachers.awaited",
                        teachers=self._whom,
                        waited_s=round(waited_s, 1),
                        limit_s=limit_s,
                        cause=cause,
                    )
                    tell_at = now + TELL_EVERY_S
                self._done.wait(min(tell_at - now, self._wait_limit_s - waited_s))

    # The feeder

    def put(self, epoch: Epoch, batch: Batch, requests: list[Request]) -> bool:
        """Add a batch and its requests when there is room; False when the epoch is over."""
        with self._lock:
            while epoch is self._epoch and self._unfinished >= self._window():
                self._room.wait()
            if epoch is not self._epoch:
                return False
            epoch.batches.append(batch)
            self._todo += requests
            self._unfinished += len(batch.answers)
            self._work.notify(len(requests))
            if not self._lanes or not batch.missing:
                self._done.notify_all()
            return True

    def await_signature(self, epoch: Epoch) -> ModelSignature | None:
        """Return what the teachers take, once there is one; None when the epoch is over."""
        with self._lock:
            epoch.waits_for_signature = True
            self._done.notify_all()
            while epoch is self._epoch and self._signature is None:
                self._room.wait()
            epoch.waits_for_signature = False
            return self._signature if epoch is self._epoch else None

    def end_of_source(self, epoch: Epoch, error: BaseException | None) -> None:
        """No more batches come in this epoch, because the source ended or raised `error`."""
        with self._lock:
            epoch.ended = True
            epoch.error = error
            self._done.notify_all()

    # Lanes

    def agree(self, signature: ModelSignature) -> ModelSignature:
        """Return the signature that counts: that of the first teacher ever seen."""
        with self._lock:
            if self._signature is None:
                self._signature = signature
                self._room.notify_all()
            return self._signature

    def join(self, lane: Lane) -> None:
        """The lane is connected to a teacher that is ready."""
        with self._lock:
            self._lanes[lane.address] += 1
            self._room.notify_all()
            self._done.notify_all()

    def part(self, lane: Lane, trouble: str = "") -> None:
        """The lane is not connected any more; what it was asked is asked of another."""
        with self._lock:
            self._lanes[lane.address] -= 1
            self._lanes = +self._lanes  # without those at zero
            request, lane.asked = lane.asked, None
            self._ask_again(request)
            self.lacks(trouble)

    def lacks(self, trouble: str) -> None:
        """A teacher can't be used, because of `trouble`; empty for none."""
        with self._lock:
            self._trouble = trouble or self._trouble
            if not self._lanes:
                self._lacking_since = self._lacking_since or time.monotonic()
                self._done.notify_all()

    def take(self, lane: Lane) -> Request | None:
        """Return what to ask next, when there is something; None when the lane is to end."""
        with self._lock:
            lane.asked = None
            while not lane.leaving:
                while self._todo:
                    request = self._todo.popleft()
                    if not request.answered:
                        lane.asked = request
                        return request
                self._work.wait()
            return None

    def answer(self, lane: Lane, answers: Answers) -> None:
        """Bring the answers to what the lane was asked. Only the first answers to a request count."""
        with self._lock:
            request, lane.asked = lane.asked, None
            if request is None or request.answered:
                return
            self._lacking_since = None
            self._answered[lane.address] += 1
            batch = request.batch
            batch.answers[request.index] = answers
            batch.missing -= 1
            if (
                not batch.missing
                and self._epoch is not None
                and self._epoch.batches
                and batch is self._epoch.batches[0]
            ):
                self._done.notify_all()

    def dismiss(self, lanes: list[Lane]) -> None:
        """Let these lanes end; what they are asked just now is asked of others too, for they may never answer it."""
        with self._lock:
            for lane in lanes:
                lane.leaving = True
                self._ask_again(lane.asked)
            self._work.notify_all()

    # All

    def fail(self, failure: BaseException) -> None:
        """Raise `failure` in the training script, now and for good."""
        with self._lock:
            self._failure = self._failure or failure
            self._done.notify_all()

    def refuse(self, lane: Lane, failure: BaseException) -> None:
        """The lane's request would be refused by every teacher: raise `failure` in the training script."""
        with self._lock:
            request, lane.asked = lane.asked, None
            if request is not None and self._epoch is not None and request.batch in self._epoch.batches:
                self._epoch.failure = failure
                self._done.notify_all()

    def close(self) -> None:
        """End the epoch and let everybody go who waits here."""
        with self._lock:
            self._closed = True
            self._drop_epoch()
            self._work.notify_all()

    def stats(self) -> ReaderStats:
        with self._lock:
            return ReaderStats(
                batches=self._batches,
                samples=self._samples,
                samples_per_s=self._meter.rate(self._samples, time.monotonic()),
                teachers=len(self._lanes),
                answered=dict(self._answered),
                epoch=max(0, self._epochs - 1),
            )

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise DistillError("this reader is closed")

    def _window(self) -> int:
        return max(LEAST_REQUESTS, REQUESTS_A_LANE * self._lanes.total() + 2)

    def _delivered(self, batch: Batch) -> Batch:
        self._unfinished -= len(batch.answers)
        self._batches += 1
        self._samples += batch.samples
        self._meter.mark(self._samples, time.monotonic())
        self._room.notify_all()
        return batch

    def _ask_again(self, request: Request | None) -> None:
        if request is not None and not request.answered and self._epoch and request.batch in self._epoch.batches:
            self._todo.appendleft(request)
            self._work.notify()

    def _drop_epoch(self) -> None:
        self._epoch = None
        self._todo.clear()
        self._unfinished = 0
        self._room.notify_all()
        self._done.notify_all()
