"""Hands the requests to one pool to its workers, the connections of its teachers.

A worker takes one request at a time and brings the answers, or gives it back when its teacher fails. What comes back is
taken before what was never asked, oldest first: the training script waits for the oldest. So a teacher gets work as
fast as it does it, and not in equal parts. A request that is under way for too long is hedged: a worker of another
teacher takes it, too, and whose answers come first counts.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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
"""A request under which so many predictors died is given up: the second was asked nothing else at that time."""

REQUESTS_PER_WORKER = 2
"""One that is being answered and one that waits, so that a worker never waits for the source."""

_BY_TURN = attrgetter("turn")

log = get_logger(__name__)


class PipelineSignals:
    """What a dispatcher and its pipeline share: one lock, and whom to wake.

    - `room`: the feeder, when there is more room, or a model is known.
    - `done`: the training script, when what it waits for has come or can't come.
    - `request_sent`: called when a teacher comes or is asked something, for whoever watches how long that takes.
    - `split`: called with a request that failed; tells whether it was more than usual and is asked in parts.
    """

    def __init__(
        self, lock: threading.RLock, request_sent: Callable[[], None], split: Callable[[Request], bool]
    ) -> None:
        self.lock = lock
        self.room = threading.Condition(lock)
        self.done = threading.Condition(lock)
        self.request_sent = request_sent
        self.split = split


class WorkerSlot:
    """What the pipeline knows of one connection: its teacher, and what that is asked at the moment, since when.

    `requeued` is true when another teacher is asked the same since this one may never answer.
    """

    __slots__ = ("address", "asked", "asked_at", "leaving", "requeued")

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked: Request | None = None
        self.asked_at = 0.0  # monotonic seconds
        self.requeued = False
        self.leaving = False

    def ask(self, request: Request, now: float) -> None:
        """Note what it is asked."""
        self.asked = request
        self.asked_at = now
        self.requeued = False

    @property
    def pending(self) -> Request | None:
        """What it is asked, if an answer is still wanted."""
        request = self.asked
        return request if request is not None and not request.settled else None


class Dispatcher:
    """The requests to one pool. Every method is safe from any thread.

    - `connected`: the addresses of the teachers in use: connected, and not about to leave.
    - `retries`: how often a request was asked again; `hedges`: how often of a second teacher.
    """

    def __init__(self, signals: PipelineSignals, timeout: AnswerTimeout) -> None:
        self.connected: frozenset[str] = frozenset()
        self.retries = 0
        self.hedges = 0
        self._signals = signals
        self._lock = signals.lock
        self._timeout = timeout
        self._work = threading.Condition(signals.lock)  # for workers
        self._queue: deque[Request] = deque()  # by turn
        self._to_hedge: list[Request] = []  # to be asked of a second teacher; by turn
        self._busy: dict[WorkerSlot, None] = {}  # those that are asked something, the longest first
        self._asked = BusyMeter(time.monotonic())
        self._workers: set[WorkerSlot] = set()  # those that are connected and stay
        self._signature: ModelSignature | None = None
        self._hedging = HedgingPolicy(time.monotonic())
        self._sizing = RequestSizing()

    # The pipeline; it holds the lock

    @property
    def signature(self) -> ModelSignature | None:
        """What the teachers take, None before the first was seen."""
        return self._signature

    @property
    def window(self) -> int:
        """How many requests to have at hand."""
        return REQUESTS_PER_WORKER * len(self._workers) + 2

    @property
    def most_rows(self) -> int:
        """How many rows a request should have at most, where its teachers' answers don't depend on that."""
        return self._sizing.rows

    @property
    def queued(self) -> int:
        """How many requests wait for a teacher."""
        return len(self._queue)

    @property
    def in_flight(self) -> Sequence[str]:
        """The addresses of the workers that are asked something."""
        return [worker.address for worker in self._busy]

    def asked_s(self, now: float) -> float:
        """Return how long teachers were asked something, all of them together."""
        return self._asked.total_s(now)

    def enqueue(self, requests: Sequence[Request], now: float) -> None:
        """Have these asked, in their turn."""
        if not self._queue and not self._busy:
            self._timeout.restart(now)
        for request in requests:
            insort(self._queue, request, key=_BY_TURN)
        self._work.notify(len(requests))

    def drop_settled(self) -> None:
        """Forget the requests whose epoch is over."""
        self._queue = deque(request for request in self._queue if not request.settled)
        self._to_hedge = [request for request in self._to_hedge if not request.settled]

    def pause_s(self, now: float, waiting_since: float) -> float:
        """Return after how many seconds a waiting script should look again. Raises NoTeacherError."""
        return self._timeout.pause_s(now, waiting_since=waiting_since, connected=bool(self._workers))

    def restart_timeout(self, now: float) -> None:
        """Something begins to wait for this pool's teachers."""
        self._timeout.restart(now)

    def wake_workers(self) -> None:
        """Wake all workers, to see whether they are to end."""
        self._work.notify_all()

    def hedge(self, now: float) -> float | None:
        """Have requests asked of a second teacher that take too long; return when to look again, None for not yet.

        One is hedged as long as the script waits for it, or other teachers would have nothing to do.
        """
        if len(self.connected) < 2:
            return None
        delay_s = self._hedging.delay_s
        pauses = []
        for worker in self._busy:
            request = worker.pending
            if request is None or request.hedged:
                continue
            left_s = worker.asked_at + delay_s - now
            if left_s > 0:
                pauses.append(left_s)
            elif (request.batch.awaited or not self._queue) and self._hedging.spend(now):
                request.hedged = True
                insort(self._to_hedge, request, key=_BY_TURN)
                self._work.notify_all()  # for which worker is free and of another teacher, only the workers know
            else:
                pauses.append(delay_s)
        return min(pauses, default=None)

    # Workers

    def agree_on_signature(self, signature: ModelSignature) -> ModelSignature:
        """Return the signature that counts: that of the first teacher ever seen."""
        with self._lock:
            if self._signature is None:
                self._signature = signature
                self._signals.room.notify_all()
            return self._signature

    def add_worker(self, worker: WorkerSlot) -> None:
        """The worker is connected to a teacher that is ready."""
        with self._lock:
            if not worker.leaving:
                self._use([*self._workers, worker])
            self._signals.room.notify_all()
            self._signals.request_sent()  # if what others are asked takes long, there may be somebody new to ask

    def remove_worker(self, worker: WorkerSlot) -> None:
        """The worker is not connected any more; what it was asked is asked of another."""
        with self._lock:
            self._use(other for other in self._workers if other is not worker)
            self._requeue(worker)
            self._release(worker)
            self._signals.done.notify_all()

    def report_unavailable(self, cause: str) -> None:
        """A teacher can't be used, because of `cause`."""
        with self._lock:
            self._timeout.last_error = cause
            self._signals.done.notify_all()

    def take_request(self, worker: WorkerSlot) -> Request | None:
        """Return what to ask next, when there is something; None when the worker is to end."""
        with self._lock:
            while not worker.leaving:
                request = self._next_request(worker)
                if request is not None:
                    worker.ask(request, time.monotonic())
                    self._busy[worker] = None
                    self._asked.begin(worker.address, worker.asked_at)
                    if len(self.connected) > 1:  # else there is nobody to ask, too
                        self._signals.request_sent()
                    return request
                self._work.wait()
            return None

    def _next_request(self, worker: WorkerSlot) -> Request | None:
        while self._queue and self._queue[0].settled:
            self._queue.popleft()
        to_hedge = self._hedge_candidate(worker) if self._to_hedge else None
        if to_hedge is not None and (not self._queue or to_hedge.turn < self._queue[0].turn):
            self._to_hedge.remove(to_hedge)
            self.hedges += 1
            return to_hedge
        return self._queue.popleft() if self._queue else None

    def _hedge_candidate(self, worker: WorkerSlot) -> Request | None:
        self._to_hedge = [request for request in self._to_hedge if not request.settled]
        its_own = [other.asked for other in self._busy if other.address == worker.address]
        return next((request for request in self._to_hedge if request not in its_own), None)

    def complete(self, worker: WorkerSlot, answers: Answers) -> None:
        """Bring the answers to what the worker was asked. Only the first answers to a request count."""
        with self._lock:
            now = time.monotonic()
            self._hedging.note(now - worker.asked_at)
            self._sizing.note(now - worker.asked_at)
            self._timeout.note_answer(worker.address, now)
            request = self._release(worker)
            if request is None:
                return
            self._timeout.restart(now)
            request.answer(worker.address, answers, now)
            self._wake_script(request.batch)

    def fail_request(self, worker: WorkerSlot, failure: Exception) -> bool:
        """The worker's teacher can't answer what it is asked; another may, unless the request is hopeless.

        Return whether it may have been asked too much, and is asked anew.
        """
        with self._lock:
            request = worker.pending
            if request is None:
                return False
            if self._asks_anew(worker, request, failure):
                return True
            now = time.monotonic()
            request.fail(worker.address, now)
            if request.is_hopeless({*self.connected, *self._timeout.recently_answered(now)}, now):
                self._give_up(worker, failure)
            return False

    def note_predictor_death(self, worker: WorkerSlot, error: InferenceError) -> None:
        """The predictor of the worker's teacher died under what it is asked.

        That is asked once more, alone and of one teacher; the second time it is given up, or it would end all of them.
        Of what was more than usual, each part is.
        """
        with self._lock:
            request = worker.pending
            if request is None:
                return
            request.deaths += (worker.address,)
            request.hedged = True
            if self._asks_anew(worker, request, error):
                return
            if len(request.deaths) >= MAX_PREDICTOR_DEATHS:
                self._give_up(worker, DeadlyRequestError(request.name, request.deaths, error.reason))

    def refuse_request(self, worker: WorkerSlot, refusal: Exception) -> bool:
        """The worker's teacher says that what it is asked is wrong; return whether that is so.

        It is when all teachers in use say so, each asked once. What was more than usual is asked anew first.
        """
        with self._lock:
            request = worker.pending
            if request is None:
                return False
            if self._asks_anew(worker, request, refusal):
                return True
            request.fail(worker.address, time.monotonic())
            is_wrong = request.failed_by >= self.connected
            if is_wrong:
                self._give_up(worker, refusal)
            return is_wrong

    def _asks_anew(self, worker: WorkerSlot, request: Request, failure: Exception) -> bool:
        """Have what failed asked in parts of the usual size, if it was more; that tells what is wrong with which."""
        if not self._signals.split(request):
            return False
        self._release(worker)
        if self._sizing.rows > DEFAULT_ROWS:
            log.warning("requests.too_large", rows=request.rows, most_rows=DEFAULT_ROWS, cause=str(failure))
        self._sizing.fail()
        return True

    def _give_up(self, worker: WorkerSlot, failure: Exception) -> None:
        """Raise `failure` in the training script when the turn of what the worker is asked has come."""
        request = self._release(worker)
        if request is not None:
            request.batch.failure = _naming_batch(failure, request.name, worker.address)
            self._wake_script(request.batch)

    def dismiss_workers(self, workers: list[WorkerSlot]) -> None:
        """Let these workers end; what they are asked just now is asked of others too, for they may never answer it."""
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
        """Have what the worker is asked be taken by another, in its turn, unless another is asked it already."""
        request = worker.pending
        if request is None or worker.requeued:
            return
        worker.requeued = True
        request.hedged = bool(request.deaths)  # else one teacher less is asked, and the one that is left may be slow
        if any(other.asked is request for other in self._busy if other is not worker and not other.requeued):
            self._signals.request_sent()
            return
        if request in self._to_hedge:
            self._to_hedge.remove(request)
        self.retries += 1
        insort(self._queue, request, key=_BY_TURN)
        self._work.notify()

    def _release(self, worker: WorkerSlot) -> Request | None:
        """Have the worker asked nothing any more; return what was pending."""
        request = worker.pending
        worker.asked = None
        if worker in self._busy:
            del self._busy[worker]
            self._asked.end(worker.address, time.monotonic())
        return request

    def _wake_script(self, batch: Batch) -> None:
        if batch.awaited and (batch.failure is not None or not batch.missing):
            self._signals.done.notify()


def _naming_batch(failure: Exception, batch: str, address: str) -> Exception:
    """Return the error for the training script, which names the batch and the teacher."""
    named = failure
    if isinstance(failure, InferenceError):
        reason = f"{batch} of the epoch: {failure.reason}"
        named = InferenceError(failure.address, failure.status, reason, retryable=failure.retryable)
    elif isinstance(failure, ProtocolError):
        words = str(failure)
        named = ProtocolError(f"{batch} of the epoch: {words if address in words else f'teacher {address}: {words}'}")
    if named is not failure:
        named.__cause__ = failure
    return named
