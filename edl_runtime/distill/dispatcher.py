"""Distributes the requests to one pool over its workers, the connections to its teachers.

A worker takes one request at a time and delivers the answers, or returns it when its teacher fails. Requests are taken
oldest first, returned ones included, since the training script waits for the oldest. So each teacher gets work at its
own speed. A request that takes too long is hedged: a worker of another teacher takes it too, and the first answers
count.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from edl_runtime.distill.batching import Batch, Request
from edl_runtime.distill.bindings import Answers
from edl_runtime.distill.dispatch_policy import DEFAULT_ROWS, AnswerTimeout, HedgingPolicy, RequestSizing
from edl_runtime.distill.errors import DeadlyRequestError
from edl_runtime.log import get_logger
from edl_runtime.meter import BusyMeter
from edl_runtime.protocol.errors import InferenceError, ProtocolError
from edl_runtime.protocol.oip import ModelSignature

MAX_PREDICTOR_DEATHS = 2
"""A request under which so many predictors died is given up: the second one ran nothing else at that time."""

REQUESTS_PER_WORKER = 2
"""One at the teacher and one in the queue, so that a worker never waits for the source."""

_BY_TURN = attrgetter("turn")

log = get_logger(__name__)


class PipelineSignals:
    """The lock and conditions that dispatchers and their pipeline share.

    - `room`: wakes the feeder, when there is more room or a model is known.
    - `done`: wakes the training script, when its batch is complete or can't be completed.
    - `request_sent`: called when a teacher is added or gets a request, for the thread that hedges.
    - `split`: called with a failed request; returns whether it was larger than usual and was replaced by its parts.
    """

    def __init__(
        self, lock: threading.RLock, request_sent: Callable[[], None], split: Callable[[Request], bool]
    ) -> None:
        self.lock = lock
        self.room = threading.Condition(lock)
        self.done = threading.Condition(lock)
        self.request_sent = request_sent
        self.split = split


@dataclass(slots=True, eq=False, repr=False)
class WorkerSlot:
    """A worker as its dispatcher sees it: its teacher, and the request that it has, since when (monotonic seconds).

    `requeued` is true when another teacher gets the same request since this one may never answer.
    """

    address: str
    request: Request | None = None
    sent_at: float = 0.0
    requeued: bool = False
    leaving: bool = False

    def assign(self, request: Request, now: float) -> None:
        self.request, self.sent_at, self.requeued = request, now, False

    @property
    def pending(self) -> Request | None:
        """Its request, if that still needs an answer."""
        request = self.request
        return request if request is not None and not request.settled else None


class Dispatcher:
    """The requests to one pool. Every method is safe from any thread.

    - `timeout`: how long its teachers have not answered.
    - `connected`: the addresses of the teachers in use: connected, and not about to leave.
    - `signature`: of the teachers' model; None before the first teacher is connected.
    - `retries`: how often a request was sent again; `hedges`: how often to a second teacher.
    """

    def __init__(self, signals: PipelineSignals, timeout: AnswerTimeout) -> None:
        self.connected: frozenset[str] = frozenset()
        self.signature: ModelSignature | None = None
        self.retries = 0
        self.hedges = 0
        self._signals = signals
        self._lock = signals.lock
        self.timeout = timeout
        self._work = threading.Condition(signals.lock)  # for workers
        self._queue: deque[Request] = deque()  # by turn
        self._to_hedge: list[Request] = []  # for a second teacher; by turn
        self._busy: dict[WorkerSlot, None] = {}  # those with a request, the oldest first
        self._asked = BusyMeter(time.monotonic())
        self._workers: set[WorkerSlot] = set()  # those connected and not leaving
        self._hedging = HedgingPolicy(time.monotonic())
        self._sizing = RequestSizing()

    # Called by the pipeline, which holds the lock

    @property
    def window(self) -> int:
        """How many unanswered requests to have."""
        return REQUESTS_PER_WORKER * len(self._workers) + 2

    @property
    def most_rows(self) -> int:
        """Most rows that a request should have, for models whose answers don't depend on that."""
        return self._sizing.rows

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def in_flight(self) -> Sequence[str]:
        """The addresses of the workers that have a request."""
        return [worker.address for worker in self._busy]

    def asked_s(self, now: float) -> float:
        """Return how long teachers have had requests, summed over all teachers."""
        return self._asked.total_s(now)

    def enqueue(self, requests: Sequence[Request], now: float) -> None:
        if not self._queue and not self._busy:
            self.timeout.restart(now)
        for request in requests:
            insort(self._queue, request, key=_BY_TURN)
        self._work.notify(len(requests))

    def drop_settled(self) -> None:
        self._queue = deque(request for request in self._queue if not request.settled)
        self._to_hedge = [request for request in self._to_hedge if not request.settled]

    def pause_s(self, now: float, waiting_since: float) -> float:
        """Return after how many seconds a waiting script should check again. Raises NoTeacherError."""
        return self.timeout.pause_s(now, waiting_since=waiting_since, connected=bool(self._workers))

    def wake_workers(self) -> None:
        self._work.notify_all()

    def hedge(self, now: float) -> float | None:
        """Send slow requests to a second teacher; return after how many seconds to check again, None for not yet.

        A slow request is hedged if the script waits for it or nothing else is queued.
        """
        if len(self.connected) < 2:
            return None
        delay_s = self._hedging.delay_s
        pauses = []
        for worker in self._busy:
            request = worker.pending
            if request is None or request.hedged:
                continue
            left_s = worker.sent_at + delay_s - now
            if left_s > 0:
                pauses.append(left_s)
            elif (request.batch.awaited or not self._queue) and self._hedging.spend(now):
                request.hedged = True
                insort(self._to_hedge, request, key=_BY_TURN)
                self._work.notify_all()  # only workers know which of them is free and of another teacher
            else:
                pauses.append(delay_s)
        return min(pauses, default=None)

    # Called by workers

    def agree_on_signature(self, signature: ModelSignature) -> ModelSignature:
        """Return the signature that all teachers must have: that of the first one connected."""
        with self._lock:
            if self.signature is None:
                self.signature = signature
                self._signals.room.notify_all()
            return self.signature

    def add_worker(self, worker: WorkerSlot) -> None:
        """Use a worker that is connected to a ready teacher."""
        with self._lock:
            if not worker.leaving:
                self._use([*self._workers, worker])
            self._signals.room.notify_all()
            self._signals.request_sent()  # the new teacher may take a slow request of another

    def remove_worker(self, worker: WorkerSlot) -> None:
        with self._lock:
            self._use(other for other in self._workers if other is not worker)
            self._requeue(worker)
            self._release(worker)
            self._signals.done.notify_all()

    def report_unavailable(self, cause: str) -> None:
        """Keep `cause` as the last reason why a teacher can't be used."""
        with self._lock:
            self.timeout.last_error = cause
            self._signals.done.notify_all()

    def take_request(self, worker: WorkerSlot) -> Request | None:
        """Wait for a request and return it; None when the worker has to end."""
        with self._lock:
            while not worker.leaving:
                request = self._next_request(worker)
                if request is not None:
                    worker.assign(request, time.monotonic())
                    self._busy[worker] = None
                    self._asked.begin(worker.address, worker.sent_at)
                    if len(self.connected) > 1:  # else there is no teacher to hedge with
                        self._signals.request_sent()
                    return request
                self._work.wait()
            return None

    def _next_request(self, worker: WorkerSlot) -> Request | None:
        while self._queue and self._queue[0].settled:
            self._queue.popleft()
        if self._to_hedge:
            self._to_hedge = [request for request in self._to_hedge if not request.settled]
            same_teacher = [other.request for other in self._busy if other.address == worker.address]
            slow = next((request for request in self._to_hedge if request not in same_teacher), None)
            if slow is not None and (not self._queue or slow.turn < self._queue[0].turn):
                self._to_hedge.remove(slow)
                self.hedges += 1
                return slow
        return self._queue.popleft() if self._queue else None

    def complete(self, worker: WorkerSlot, answers: Answers) -> None:
        """Deliver the answers to the worker's request. Only the first answers to a request count."""
        with self._lock:
            now = time.monotonic()
            self._hedging.note(now - worker.sent_at)
            self._sizing.note(now - worker.sent_at)
            self.timeout.note_answer(worker.address, now)
            request = self._release(worker)
            if request is None:
                return
            self.timeout.restart(now)
            request.answer(worker.address, answers, now)
            self._wake_script(request.batch)

    def fail_request(self, worker: WorkerSlot, error: InferenceError | ProtocolError) -> bool:
        """The worker's teacher failed its request; return whether the request is at fault, not the teacher.

        - A request larger than usual is sent in parts of the usual size, since its size may be the cause.
        - One under which the predictor died is sent once more, alone and to one teacher. The second time it is given
          up, since it would end every predictor.
        - One that is refused as invalid is given up once all teachers in use have refused it.
        - Any other may be answered by another teacher, unless it is hopeless.
        """
        death = error if isinstance(error, InferenceError) and error.predictor_died else None
        with self._lock:
            request = worker.pending
            if request is None:
                return False
            if death is not None:
                request.deaths += (worker.address,)
                request.hedged = True
            if self._split(worker, request, error):
                return death is None
            if death is not None:
                if len(request.deaths) >= MAX_PREDICTOR_DEATHS:
                    self._give_up(worker, DeadlyRequestError(request.name, request.deaths, death.reason))
                return False
            now = time.monotonic()
            request.fail(worker.address, now)
            if isinstance(error, InferenceError) and not error.retryable:
                is_invalid = give_up = request.failed_by >= self.connected
            else:
                is_invalid = False
                give_up = request.is_hopeless({*self.connected, *self.timeout.recently_answered(now)}, now)
            if give_up:
                self._give_up(worker, error)
            return is_invalid

    def _split(self, worker: WorkerSlot, request: Request, failure: Exception) -> bool:
        """Send a failed request in parts of the usual size if it was larger, to find the part at fault."""
        if not self._signals.split(request):
            return False
        self._release(worker)
        if self._sizing.rows > DEFAULT_ROWS:
            log.warning("requests.too_large", rows=request.rows, most_rows=DEFAULT_ROWS, cause=str(failure))
        self._sizing.fail()
        return True

    def _give_up(self, worker: WorkerSlot, failure: Exception) -> None:
        """Raise `failure` in the training script in place of the batch of the worker's request."""
        request = self._release(worker)
        if request is not None:
            request.batch.failure = _naming_batch(failure, request.name, worker.address)
            self._wake_script(request.batch)

    def dismiss_workers(self, workers: list[WorkerSlot]) -> None:
        """Let these workers end. Others get their requests too, since they may never answer them."""
        with self._lock:
            self._use(worker for worker in self._workers if worker not in workers)
            for worker in workers:
                worker.leaving = True
                self._requeue(worker)
            self._work.notify_all()

    def _use(self, workers: Iterable[WorkerSlot]) -> None:
        self._workers = set(workers)
        self.connected = frozenset(worker.address for worker in self._workers)

    def _requeue(self, worker: WorkerSlot) -> None:
        """Queue the worker's request again, unless another worker has it."""
        request = worker.pending
        if request is None or worker.requeued:
            return
        worker.requeued = True
        request.hedged = bool(request.deaths)  # may be hedged again: one teacher less has it now
        if any(other.request is request for other in self._busy if other is not worker and not other.requeued):
            self._signals.request_sent()
            return
        if request in self._to_hedge:
            self._to_hedge.remove(request)
        self.retries += 1
        insort(self._queue, request, key=_BY_TURN)
        self._work.notify()

    def _release(self, worker: WorkerSlot) -> Request | None:
        """Take the worker's request away; return it if it was pending."""
        request = worker.pending
        worker.request = None
        if worker in self._busy:
            del self._busy[worker]
            self._asked.end(worker.address, time.monotonic())
        return request

    def _wake_script(self, batch: Batch) -> None:
        if batch.awaited and (batch.failure is not None or not batch.missing):
            self._signals.done.notify()


def _naming_batch(failure: Exception, batch: str, address: str) -> Exception:
    """Return an error for the training script that names the batch and the teacher."""
    named = failure
    if isinstance(failure, InferenceError):
        reason = f"{batch} of the epoch: {failure.reason}"
        named = InferenceError(failure.address, failure.status, reason, retryable=failure.retryable)
    elif isinstance(failure, ProtocolError):
        text = str(failure)
        named = ProtocolError(f"{batch} of the epoch: {text if address in text else f'teacher {address}: {text}'}")
    if named is not failure:
        named.__cause__ = failure
    return named
