"""Between the source, the teachers and the training script: a bounded window of requests, delivered in order.

Three kinds of threads meet here. The feeder puts batches in, in order, and waits for room. A lane, one of a teacher's
connections, takes one request at a time and brings the answers, or gives it back when the teacher fails: then it is
the next to be taken. The training script takes whole batches in the order of the source.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque

from edl_runtime.distill.batches import Batch, Request
from edl_runtime.distill.epoch import Epoch, Lane
from edl_runtime.distill.feeds import Answers
from edl_runtime.distill.patience import TELL_EVERY_S, Patience
from edl_runtime.distill.stats import ReaderStats, Tally
from edl_runtime.errors import DistillError
from edl_runtime.protocol.oip import ModelSignature

REQUESTS_A_LANE = 2
"""One that is being answered and one that waits, so that a lane never waits for the source."""

LEAST_REQUESTS = 4


class Pipeline:
    """The requests of one reader. Every method is safe from any thread.

    The window is counted in requests; an item of the source goes in whole, so that one with many may exceed it.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        lock = threading.RLock()  # reentrant: the garbage collector may close the reader from inside
        self._lock = lock
        self._work = threading.Condition(lock)  # for lanes
        self._room = threading.Condition(lock)  # for the feeder
        self._done = threading.Condition(lock)  # for the training script
        self._todo: deque[Request] = deque()
        self._unfinished = 0  # weight of the batches between put and take_batch
        self._epoch: Epoch | None = None
        self._lanes: Counter[str] = Counter()
        self._signature: ModelSignature | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._tally = Tally(time.monotonic())

    # The training script

    def begin(self) -> Epoch:
        """Start the next epoch; the one before is over, finished or not. Raises DistillError when closed."""
        with self._lock:
            self._check()
            self._drop_epoch()
            self._epoch = Epoch()
            self._tally.epochs += 1
            return self._epoch

    def end(self, epoch: Epoch) -> None:
        """Be done with the epoch: what is left of it is dropped, answers that are under way included."""
        with self._lock:
            if epoch is self._epoch:
                self._drop_epoch()

    def take_batch(self, epoch: Epoch) -> Batch | None:
        """Return the next batch with its answers, None at the epoch's end; wait for it as long as teachers answer.

        Raises what the source raised, when its turn has come; what a request failed with; NoTeacherError; whatever
        `fail` was given; DistillError when the reader was closed or another epoch was begun.
        """
        with self._lock:
            waiting_since: float | None = None
            while not self._has_next(epoch):
                now = time.monotonic()
                waiting_since = waiting_since or now
                pause_s = TELL_EVERY_S
                if epoch.waits_for_teachers:
                    pause_s = self._patience.pause_s(now, waiting_since=waiting_since, connected=bool(self._lanes))
                self._done.wait(pause_s)
            if not epoch.batches:
                return None
            batch = epoch.batches.popleft()
            self._unfinished -= batch.weight
            self._tally.deliver(batch.samples, batch.answered_by, time.monotonic())
            self._room.notify()
            return batch

    def _has_next(self, epoch: Epoch) -> bool:
        """Whether there is no need to wait: for a batch, the end or an error, which is raised."""
        self._check()
        if epoch is not self._epoch:
            raise DistillError("this epoch is over: the reader was iterated anew; use one iteration at a time")
        if epoch.failure is not None:
            raise epoch.failure
        if epoch.batches:
            return not epoch.batches[0].missing
        if epoch.ended and epoch.error is not None:
            raise epoch.error
        return epoch.ended

    # The feeder

    def goes_on(self, epoch: Epoch) -> bool:
        """Whether the epoch is not over."""
        return epoch is self._epoch

    def put(self, epoch: Epoch, batch: Batch, requests: list[Request]) -> bool:
        """Add a batch and its requests when there is room; False when the epoch is over."""
        with self._lock:
            while epoch is self._epoch and self._unfinished >= self._window():
                self._room.wait()
            if epoch is not self._epoch:
                return False
            if not epoch.batches:
                self._patience.restart(time.monotonic())
            epoch.batches.append(batch)
            self._todo += requests
            self._unfinished += batch.weight
            self._work.notify(len(requests))
            if not self._lanes or not batch.missing:
                self._done.notify()
            return True

    def await_signature(self, epoch: Epoch) -> ModelSignature | None:
        """Return what the teachers take, once there is one; None when the epoch is over."""
        with self._lock:
            epoch.waits_for_signature = True
            self._patience.restart(time.monotonic())
            self._done.notify()
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

    def part(self, lane: Lane) -> None:
        """The lane is not connected any more; what it was asked is asked of another."""
        with self._lock:
            self._lanes[lane.address] -= 1
            self._lanes = +self._lanes  # without those at zero
            self._ask_again(lane.release(self._epoch))
            self._done.notify_all()

    def lacks(self, trouble: str) -> None:
        """A teacher can't be used, because of `trouble`."""
        with self._lock:
            self._patience.trouble = trouble
            self._done.notify_all()

    def take(self, lane: Lane) -> Request | None:
        """Return what to ask next, when there is something; None when the lane is to end."""
        with self._lock:
            lane.asked = None
            while not lane.leaving:
                while self._todo:
                    request = self._todo.popleft()
                    if not request.answered:
                        lane.ask(request, self._epoch)
                        return request
                self._work.wait()
            return None

    def answer(self, lane: Lane, answers: Answers) -> None:
        """Bring the answers to what the lane was asked. Only the first answers to a request count."""
        with self._lock:
            request = lane.release(self._epoch)
            if request is None:
                return
            self._patience.restart(time.monotonic())
            request.answer(lane.address, answers)
            batch = request.batch
            if not batch.missing and self._epoch is not None and batch is self._epoch.batches[0]:
                self._done.notify()

    def fail_request(self, lane: Lane, failure: Exception) -> None:
        """The lane's teacher can't answer what it is asked; another may, unless the request is hopeless."""
        with self._lock:
            request = lane.pending(self._epoch)
            if request is None:
                return
            now = time.monotonic()
            request.fail(lane.address, now)
            if request.is_hopeless(self._lanes, now):
                self.refuse(lane, failure)

    def refuse(self, lane: Lane, failure: Exception) -> None:
        """No teacher answers what the lane is asked: raise `failure` in the training script."""
        with self._lock:
            if lane.release(self._epoch) is not None and self._epoch is not None:
                self._epoch.failure = failure
                self._done.notify_all()

    def dismiss(self, lanes: list[Lane]) -> None:
        """Let these lanes end; what they are asked just now is asked of others too, for they may never answer it."""
        with self._lock:
            for lane in lanes:
                lane.leaving = True
                self._ask_again(lane.pending(self._epoch))
            self._work.notify_all()

    # All

    def fail(self, failure: BaseException) -> None:
        """Raise `failure` in the training script, now and for good."""
        with self._lock:
            self._failure = self._failure or failure
            self._done.notify_all()

    def close(self) -> None:
        """End the epoch and let everybody go who waits here."""
        with self._lock:
            self._closed = True
            self._drop_epoch()
            self._work.notify_all()

    def stats(self) -> ReaderStats:
        with self._lock:
            return self._tally.stats(len(self._lanes), time.monotonic())

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise DistillError("this reader is closed")

    def _window(self) -> int:
        return max(LEAST_REQUESTS, REQUESTS_A_LANE * self._lanes.total() + 2)

    def _ask_again(self, request: Request | None) -> None:
        if request is not None:
            self._todo.appendleft(request)
            self._work.notify()

    def _drop_epoch(self) -> None:
        self._epoch = None
        self._todo.clear()
        self._unfinished = 0
        self._room.notify_all()
        self._done.notify_all()
