"""Hands the requests to one pool to its lanes, the connections of its teachers.

A lane takes one request at a time and brings the answers, or gives it back when its teacher fails. What comes back is
taken before what was never asked, oldest first: the training script waits for the oldest. So a teacher gets work as
fast as it does it, and not in equal parts. A request that is under way for too long is hedged: a lane of another
teacher takes it, too, and whose answers come first counts.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter

from edl_runtime.distill.batches import Batch, Request
from edl_runtime.distill.epoch import Lane
from edl_runtime.distill.feeds import Answers
from edl_runtime.distill.hedging import Hedging
from edl_runtime.distill.patience import Patience
from edl_runtime.distill.seams import Seams
from edl_runtime.distill.sizing import USUAL_ROWS, Sizing
from edl_runtime.errors import DeadlyRequestError, InferenceError, ProtocolError
from edl_runtime.log import get_logger
from edl_runtime.meter import BusyTime
from edl_runtime.protocol.oip import ModelSignature

MOST_DEATHS = 2
"""A request under which so many predictors died is given up: the second was asked nothing else at that time."""

REQUESTS_A_LANE = 2
"""One that is being answered and one that waits, so that a lane never waits for the source."""

_TURN = attrgetter("turn")

log = get_logger(__name__)


class Dispatcher:
    """The requests to one pool. Every method is safe from any thread.

    - `connected`: the addresses of the teachers in use: connected, and not about to leave.
    - `retries`: how often a request was asked again; `hedges`: how often of a second teacher.
    """

    def __init__(self, seams: Seams, patience: Patience) -> None:
        self.connected: frozenset[str] = frozenset()
        self.retries = 0
        self.hedges = 0
        self._seams = seams
        self._lock = seams.lock
        self._patience = patience
        self._work = threading.Condition(seams.lock)  # for lanes
        self._todo: deque[Request] = deque()  # by turn
        self._slow: list[Request] = []  # to be asked of a second teacher; by turn
        self._busy: dict[Lane, None] = {}  # those that are asked something, the longest first
        self._asked = BusyTime(time.monotonic())
        self._lanes: set[Lane] = set()  # those that are connected and stay
        self._signature: ModelSignature | None = None
        self._hedging = Hedging(time.monotonic())
        self._sizing = Sizing()

    # The pipeline; it holds the lock

    @property
    def signature(self) -> ModelSignature | None:
        """What the teachers take, None before the first was seen."""
        return self._signature

    @property
    def window(self) -> int:
        """How many requests to have at hand."""
        return REQUESTS_A_LANE * len(self._lanes) + 2

    @property
    def most_rows(self) -> int:
        """How many rows a request should have at most, where its teachers' answers don't depend on that."""
        return self._sizing.rows

    @property
    def queued(self) -> int:
        """How many requests wait for a teacher."""
        return len(self._todo)

    @property
    def in_flight(self) -> Sequence[str]:
        """The addresses of the lanes that are asked something."""
        return [lane.address for lane in self._busy]

    def asked_s(self, now: float) -> float:
        """Return how long teachers were asked something, all of them together."""
        return self._asked.total_s(now)

    def add(self, requests: Sequence[Request], now: float) -> None:
        """Have these asked, in their turn."""
        if not self._todo and not self._busy:
            self._patience.restart(now)
        for request in requests:
            insort(self._todo, request, key=_TURN)
        self._work.notify(len(requests))

    def drop_unwanted(self) -> None:
        """Forget the requests whose epoch is over."""
        self._todo = deque(request for request in self._todo if not request.settled)
        self._slow = [request for request in self._slow if not request.settled]

    def pause_s(self, now: float, waiting_since: float) -> float:
        """Return after how many seconds a waiting script should look again. Raises NoTeacherError."""
        return self._patience.pause_s(now, waiting_since=waiting_since, connected=bool(self._lanes))

    def restart_patience(self, now: float) -> None:
        """Something begins to wait for this pool's teachers."""
        self._patience.restart(now)

    def let_go(self) -> None:
        """Wake all lanes, to see whether they are to end."""
        self._work.notify_all()

    def hedge(self, now: float) -> float | None:
        """Have requests asked of a second teacher that take too long; return when to look again, None for not yet.

        One is hedged as long as the script waits for it, or other teachers would have nothing to do.
        """
        if len(self.connected) < 2:
            return None
        delay_s = self._hedging.delay_s
        pauses = []
        for lane in self._busy:
            request = lane.pending
            if request is None or request.hedged:
                continue
            left_s = lane.asked_at + delay_s - now
            if left_s > 0:
                pauses.append(left_s)
            elif (request.batch.awaited or not self._todo) and self._hedging.spend(now):
                request.hedged = True
                insort(self._slow, request, key=_TURN)
                self._work.notify_all()  # for which lane is free and of another teacher, only the lanes know
            else:
                pauses.append(delay_s)
        return min(pauses, default=None)

    # Lanes

    def agree(self, signature: ModelSignature) -> ModelSignature:
        """Return the signature that counts: that of the first teacher ever seen."""
        with self._lock:
            if self._signature is None:
                self._signature = signature
                self._seams.room.notify_all()
            return self._signature

    def join(self, lane: Lane) -> None:
        """The lane is connected to a teacher that is ready."""
        with self._lock:
            if not lane.leaving:
                self._use([*self._lanes, lane])
            self._seams.room.notify_all()
            self._seams.asked()  # if what others are asked takes long, there may be somebody new to ask

    def part(self, lane: Lane) -> None:
        """The lane is not connected any more; what it was asked is asked of another."""
        with self._lock:
            self._use(other for other in self._lanes if other is not lane)
            self._ask_again(lane)
            self._release(lane)
            self._seams.done.notify_all()

    def lacks(self, trouble: str) -> None:
        """A teacher can't be used, because of `trouble`."""
        with self._lock:
            self._patience.trouble = trouble
            self._seams.done.notify_all()

    def take(self, lane: Lane) -> Request | None:
        """Return what to ask next, when there is something; None when the lane is to end."""
        with self._lock:
            while not lane.leaving:
                request = self._next_for(lane)
                if request is not None:
                    lane.ask(request, time.monotonic())
                    self._busy[lane] = None
                    self._asked.begin(lane.address, lane.asked_at)
                    if len(self.connected) > 1:  # else there is nobody to ask, too
                        self._seams.asked()
                    return request
                self._work.wait()
            return None

    def _next_for(self, lane: Lane) -> Request | None:
        while self._todo and self._todo[0].settled:
            self._todo.popleft()
        slow = self._slow_for(lane) if self._slow else None
        if slow is not None and (not self._todo or slow.turn < self._todo[0].turn):
            self._slow.remove(slow)
            self.hedges += 1
            return slow
        return self._todo.popleft() if self._todo else None

    def _slow_for(self, lane: Lane) -> Request | None:
        self._slow = [request for request in self._slow if not request.settled]
        its_own = [other.asked for other in self._busy if other.address == lane.address]
        return next((request for request in self._slow if request not in its_own), None)

    def answer(self, lane: Lane, answers: Answers) -> None:
        """Bring the answers to what the lane was asked. Only the first answers to a request count."""
        with self._lock:
            now = time.monotonic()
            self._hedging.note(now - lane.asked_at)
            self._sizing.note(now - lane.asked_at)
            self._patience.hear_of(lane.address, now)
            request = self._release(lane)
            if request is None:
                return
            self._patience.restart(now)
            request.answer(lane.address, answers, now)
            self._tell_script(request.batch)

    def fail_request(self, lane: Lane, failure: Exception) -> bool:
        """The lane's teacher can't answer what it is asked; another may, unless the request is hopeless.

        Return whether it may have been asked too much, and is asked anew.
        """
        with self._lock:
            request = lane.pending
            if request is None:
                return False
            if self._asks_anew(lane, request, failure):
                return True
            now = time.monotonic()
            request.fail(lane.address, now)
            if request.is_hopeless({*self.connected, *self._patience.heard_of(now)}, now):
                self._give_up(lane, failure)
            return False

    def note_death(self, lane: Lane, error: InferenceError) -> None:
        """The predictor of the lane's teacher died under what it is asked.

        That is asked once more, alone and of one teacher; the second time it is given up, or it would end all of them.
        Of what was more than usual, each part is.
        """
        with self._lock:
            request = lane.pending
            if request is None:
                return
            request.deaths += (lane.address,)
            request.hedged = True
            if self._asks_anew(lane, request, error):
                return
            if len(request.deaths) >= MOST_DEATHS:
                self._give_up(lane, DeadlyRequestError(request.name, request.deaths, error.reason))

    def refuse_request(self, lane: Lane, refusal: Exception) -> bool:
        """The lane's teacher says that what it is asked is wrong; return whether that is so.

        It is when all teachers in use say so, each asked once. What was more than usual is asked anew first.
        """
        with self._lock:
            request = lane.pending
            if request is None:
                return False
            if self._asks_anew(lane, request, refusal):
                return True
            request.fail(lane.address, time.monotonic())
            is_wrong = request.failed_by >= self.connected
            if is_wrong:
                self._give_up(lane, refusal)
            return is_wrong

    def _asks_anew(self, lane: Lane, request: Request, failure: Exception) -> bool:
        """Have what failed asked in parts of the usual size, if it was more; that tells what is wrong with which."""
        if not self._seams.ask_anew(request):
            return False
        self._release(lane)
        if self._sizing.rows > USUAL_ROWS:
            log.warning("requests.too_large", rows=request.rows, most_rows=USUAL_ROWS, cause=str(failure))
        self._sizing.fail()
        return True

    def _give_up(self, lane: Lane, failure: Exception) -> None:
        """Raise `failure` in the training script when the turn of what the lane is asked has come."""
        request = self._release(lane)
        if request is not None:
            request.batch.failure = _with_batch(failure, request.name, lane.address)
            self._tell_script(request.batch)

    def dismiss(self, lanes: list[Lane]) -> None:
        """Let these lanes end; what they are asked just now is asked of others too, for they may never answer it."""
        with self._lock:
            self._use(lane for lane in self._lanes if lane not in lanes)
            for lane in lanes:
                lane.leaving = True
                self._ask_again(lane)
            self._work.notify_all()

    def _use(self, lanes: Iterable[Lane]) -> None:
        self._lanes = set(lanes)
        self.connected = frozenset(lane.address for lane in self._lanes)

    def _ask_again(self, lane: Lane) -> None:
        """Have what the lane is asked be taken by another, in its turn, unless another is asked it already."""
        request = lane.pending
        if request is None or lane.gave_back:
            return
        lane.gave_back = True
        request.hedged = bool(request.deaths)  # else one teacher less is asked, and the one that is left may be slow
        if any(other.asked is request for other in self._busy if other is not lane and not other.gave_back):
            self._seams.asked()
            return
        if request in self._slow:
            self._slow.remove(request)
        self.retries += 1
        insort(self._todo, request, key=_TURN)
        self._work.notify()

    def _release(self, lane: Lane) -> Request | None:
        """Have the lane asked nothing any more; return what was pending."""
        request = lane.pending
        lane.asked = None
        if lane in self._busy:
            del self._busy[lane]
            self._asked.end(lane.address, time.monotonic())
        return request

    def _tell_script(self, batch: Batch) -> None:
        if batch.awaited and (batch.failure is not None or not batch.missing):
            self._seams.done.notify()


def _with_batch(failure: Exception, batch: str, address: str) -> Exception:
    """Return the error for the training script, which names the batch and the teacher."""
    told = failure
    if isinstance(failure, InferenceError):
        reason = f"{batch} of the epoch: {failure.reason}"
        told = InferenceError(failure.address, failure.status, reason, retryable=failure.retryable)
    elif isinstance(failure, ProtocolError):
        words = str(failure)
        told = ProtocolError(f"{batch} of the epoch: {words if address in words else f'teacher {address}: {words}'}")
    if told is not failure:
        told.__cause__ = failure
    return told
