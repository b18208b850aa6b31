"""Threads that send requests to teachers: one connection each, reconnected when it breaks, with quarantine."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from edl_runtime.distill.batching import Request
from edl_runtime.distill.bindings import Answers, RequestPlan
from edl_runtime.distill.data_loaders import thread_ends_here
from edl_runtime.distill.dispatcher import Dispatcher, WorkerSlot
from edl_runtime.log import get_logger
from edl_runtime.protocol.errors import InferenceError, ProtocolError
from edl_runtime.protocol.oip import ModelSignature, Normalise, TopK
from edl_runtime.protocol.tensors import Tensor
from edl_runtime.registry.members import differences

FIRST_QUARANTINE_S = 0.1
LONGEST_QUARANTINE_S = 30.0
"""A teacher in quarantine rests, each time twice as long as the time before."""

QUARANTINE_JITTER = 1.25
"""A rest is up to so many times as long, by chance: teachers that are probed at the same time again and again would be
asked the same as the last time, each of them, and what all fail would not be found."""

PROBATION = 5
"""When it has behaved for so many times the rest that would be next, that is the first again. One that answers wrongly
now and then thus loses about a tenth of its time, and one that does so all the time most of it."""

MAX_BROKEN_CONNECTIONS = 3
"""A teacher that breaks its connections so often and answers nothing in between is no better than one that lies.
More than it has connections, for all of them break when it is killed."""

log = get_logger(__name__)


class TeacherHealth:
    """What is known of one teacher; safe from any thread.

    A teacher that answers wrongly, with an error or nothing at all goes into quarantine. When it has rested, one of
    its connections probes it: is it ready, and is the answer to one request right? Then it is asked as before. Whatever
    it is asked in a probe and does not answer is asked of others, so a probe loses nothing.

    - `may_send`: set while it is out of quarantine, and from when it is not in use any more.
    - `reason`: why it is in quarantine, in words; empty if it is not.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.reason = ""
        self.may_send = threading.Event()
        self.may_send.set()
        self._lock = threading.RLock()  # reentrant: the garbage collector may retire it from inside
        self._quarantine_s = FIRST_QUARANTINE_S
        self._due_at = 0.0  # monotonic seconds
        self._recovered_at = 0.0  # monotonic seconds
        self._retired = False
        self._broken_connections = 0

    def probe_due_in_s(self, now: float) -> float:
        """How long until the teacher may be probed; 0 when it may be asked now."""
        return max(0.0, self._due_at - now) if self.reason else 0.0

    def quarantine(self, reason: str) -> None:
        """It answered wrongly or not at all: into quarantine, for longer than the last time."""
        with self._lock:
            now = time.monotonic()
            if self._retired or self.probe_due_in_s(now) > 0:
                return  # nobody waits for it, or another of its connections found it out already
            if not self.reason and now - self._recovered_at >= PROBATION * self._quarantine_s:
                self._quarantine_s = FIRST_QUARANTINE_S
            log.warning("teacher.quarantined", teacher=self.address, cause=reason, rest_s=self._quarantine_s)
            self.reason = reason
            self.may_send.clear()
            self._due_at = now + self._quarantine_s * random.uniform(1, QUARANTINE_JITTER)  # noqa: S311 - nobody is to be kept from guessing
            self._quarantine_s = min(2 * self._quarantine_s, LONGEST_QUARANTINE_S)

    def note_broken_connection(self, reason: str) -> None:
        """It closed a connection in the middle of a request: it was killed, or does so again and again."""
        with self._lock:
            self._broken_connections += 1
            too_often = self._broken_connections >= MAX_BROKEN_CONNECTIONS
        if too_often:
            self.quarantine(reason)

    def note_answer(self, asked_at: float) -> None:
        """It answered as it should what it was asked at that time; cheap enough for each answer."""
        if not self.reason and not self._broken_connections:
            return
        with self._lock:
            self._broken_connections = 0
            if not self.reason or asked_at < self._due_at:  # then that was no probe
                return
            log.info("teacher.recovered", teacher=self.address)
            self.reason = ""
            self._recovered_at = time.monotonic()
            self.may_send.set()

    def retire(self) -> None:
        """It is not in use any more: nobody waits for it to recover."""
        with self._lock:
            self._retired = True
            self.may_send.set()


# Workers

FIRST_RECONNECT_S = 0.1
LONGEST_RECONNECT_S = 1.0

BUSY_STATUSES = frozenset({408, 429, 502, 503, 504})
"""Statuses of a teacher that is busy or away, which tell nothing of the request or the model."""


class InferenceConnection(Protocol):
    """What a worker needs of `edl_runtime.protocol.client.TeacherConnection`."""

    def open(self) -> None: ...
    def close(self) -> None: ...
    def ready(self) -> bool: ...
    def signature(self) -> ModelSignature: ...
    def infer(
        self,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[str | TopK],
        normalise: Mapping[str, Normalise],
        *,
        alone: bool = False,
    ) -> Answers: ...


Connect = Callable[[str], InferenceConnection]


class UnusableTeacherError(Exception):
    """Raised inside a worker for a teacher that answers and can't be used now: not ready, or of another model."""


class InQuarantineError(Exception):
    """Raised inside a worker when another worker of the same teacher has found that it misbehaves."""


class WorkerContext(NamedTuple):
    """What all workers of a pool share: where requests come from and answers go.

    - `plan_of`: tells what is asked of teachers with a signature; what it raises goes to the training script.
    - `fail`: takes what the training script has to know.
    """

    dispatcher: Dispatcher
    connect: Connect
    plan_of: Callable[[ModelSignature], RequestPlan]
    fail: Callable[[BaseException], None]


_FAILURES = (OSError, ProtocolError, InferenceError, UnusableTeacherError)


class TeacherWorker(threading.Thread):
    """Asks one teacher what its dispatcher has for it. `gone` is set when the worker is to end.

    The workers of a teacher share its `health`; that with `number` 0 is the one that probes it.
    """

    def __init__(self, context: WorkerContext, health: TeacherHealth, number: int) -> None:
        super().__init__(name=f"edl teacher {health.address} {number}", daemon=True)
        self.slot = WorkerSlot(health.address)
        self.health = health
        self.gone = threading.Event()
        self._dispatcher, self._connect, self._plan_of, self._fail = context
        self._address = health.address
        self._probes = number == 0
        self._connection: InferenceConnection | None = None
        self._retry_s = FIRST_RECONNECT_S
        self._away = False

    def leave(self) -> None:
        """End once what is asked now is answered; doesn't wait. All workers of a teacher leave together."""
        self.gone.set()
        self.health.retire()  # whose end a worker may be waiting for

    def disconnect(self) -> None:
        """Disconnect, in the middle of a request or not."""
        connection = self._connection
        if connection is not None:
            connection.close()

    def run(self) -> None:
        try:
            while True:
                self._await_probe()
                if self.gone.is_set():
                    break
                try:
                    self._serve()
                except InQuarantineError:
                    continue
                except _FAILURES as error:
                    if not self.gone.is_set():
                        self._back_off(error)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the training script has to know
            self._fail(error)
        finally:
            thread_ends_here()  # a teacher within this process may be a model of Paddle

    def _await_probe(self) -> None:
        if self.health.reason and self._probes:
            self.gone.wait(self.health.probe_due_in_s(time.monotonic()))
        elif self.health.reason:
            self.health.may_send.wait()

    def _serve(self) -> None:
        self._connection = connection = self._connect(self._address)
        with contextlib.closing(connection):
            if self.gone.is_set():  # before there was a connection that could be closed
                return
            connection.open()
            if not connection.ready():
                raise UnusableTeacherError("it is not ready")
            plan = self._plan_of(self._agreed(connection.signature()))
            self._dispatcher.add_worker(self.slot)
            try:
                self._answer_requests(connection, plan)
            except _FAILURES as error:
                self._dispatcher.report_unavailable(self._describe(error))
                raise
            finally:
                self._dispatcher.remove_worker(self.slot)

    def _agreed(self, signature: ModelSignature) -> ModelSignature:
        agreed = self._dispatcher.agree_on_signature(signature)
        if agreed != signature and (unlike := differences(agreed, signature)):
            raise UnusableTeacherError(f"it has another model than the others: {'; '.join(unlike)}")
        return agreed

    def _answer_requests(self, connection: InferenceConnection, plan: RequestPlan) -> None:
        while (request := self._dispatcher.take_request(self.slot)) is not None:
            if not self._may_send():
                raise InQuarantineError
            self._answer(request, connection, plan)
            del request  # which holds a whole batch, and the next may be long in coming

    def _may_send(self) -> bool:
        health = self.health
        return not health.reason or (self._probes and not health.probe_due_in_s(time.monotonic()))

    def _answer(self, request: Request, connection: InferenceConnection, plan: RequestPlan) -> None:
        try:
            answers = connection.infer(request.inputs, plan.requested, plan.normalise, alone=bool(request.deaths))
            plan.check(self._address, answers, request.rows)
        except InferenceError as error:
            if self._excuses(error):
                return
            raise
        except ProtocolError as error:
            self._dispatcher.fail_request(self.slot, error)
            raise
        except OSError as error:
            if not isinstance(error, TimeoutError) and not self.gone.is_set():
                self.health.note_broken_connection(self._describe(error))
            raise
        # Kept before the training script has the answers, which may write to them; and not if it has another
        # teacher's, for then it may have written to the inputs, too, before they were sent.
        if request.cache_writer is not None and not request.settled:
            request.cache_writer.keep(answers)
        self._dispatcher.complete(self.slot, answers)
        self.health.note_answer(self.slot.asked_at)
        self._retry_s = FIRST_RECONNECT_S
        self._away = False

    def _excuses(self, error: InferenceError) -> bool:
        """Say what became of the request; return whether that, and not the teacher, is to blame."""
        if error.predictor_died:
            self._dispatcher.note_predictor_death(self.slot, error)
            return False
        if not error.retryable:
            return self._dispatcher.refuse_request(self.slot, error)
        return error.status not in BUSY_STATUSES and self._dispatcher.fail_request(self.slot, error)

    def _back_off(self, error: Exception) -> None:
        """Wait before the next try, in quarantine or not."""
        cause = self._describe(error)
        self._dispatcher.report_unavailable(cause)
        if isinstance(error, TimeoutError | ProtocolError) or (
            isinstance(error, InferenceError) and error.status not in BUSY_STATUSES
        ):
            self.health.quarantine(cause)
            return
        if not self._away:
            log.warning("teacher.away", teacher=self._address, cause=cause, retry_in_s=self._retry_s)
        self._away = True
        self.gone.wait(self._retry_s)
        self._retry_s = min(2 * self._retry_s, LONGEST_RECONNECT_S)

    def _describe(self, error: Exception) -> str:
        words = str(error) or type(error).__name__
        return words if self._address in words else f"{self._address}: {words}"


# Pool of workers


WORKERS_PER_TEACHER = 2
"""While one request is on the wire, the other is being answered."""


class TeacherPool:
    """Keeps workers to the wanted teachers of one pool."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._lock = threading.RLock()  # reentrant: the garbage collector may stop it from inside
        self._in_use: dict[str, list[TeacherWorker]] = {}
        self._threads: list[TeacherWorker] = []  # those too that finish what they are asked
        self._closed = False

    def use(self, addresses: Collection[str]) -> None:
        """Use these teachers and no others; those that leave finish what they are asked. Doesn't wait."""
        with self._lock:
            if self._closed:
                return
            leaving = [worker for address in self._in_use.keys() - addresses for worker in self._in_use.pop(address)]
            coming = [self._add(address) for address in addresses if address not in self._in_use]
        self._dismiss(leaving)
        for worker in (worker for workers in coming for worker in workers):
            worker.start()
        if not addresses:
            self.report_unavailable("no teacher is registered")

    def report_unavailable(self, cause: str) -> None:
        """There are none to use, because of `cause`."""
        self._context.dispatcher.report_unavailable(cause)

    def quarantined(self) -> dict[str, str]:
        """Return the teachers in use that are in quarantine, address → why."""
        with self._lock:
            health_by_address = {address: workers[0].health for address, workers in self._in_use.items()}
        return {address: health.reason for address, health in health_by_address.items() if health.reason}

    def stop(self) -> None:
        """Disconnect from all teachers, in the middle of what they are asked. Doesn't wait."""
        with self._lock:
            self._closed = True
            self._in_use.clear()
            threads = list(self._threads)
        self._dismiss(threads)
        for thread in threads:
            thread.disconnect()

    def join(self, until: float) -> None:
        """Wait for all threads to end, until the monotonic clock says `until`."""
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _add(self, address: str) -> list[TeacherWorker]:
        health = TeacherHealth(address)
        workers = [TeacherWorker(self._context, health, number) for number in range(WORKERS_PER_TEACHER)]
        self._in_use[address] = workers
        self._threads = [
            *(thread for thread in self._threads if thread.is_alive() or not thread.gone.is_set()),
            *workers,
        ]
        return workers

    def _dismiss(self, threads: list[TeacherWorker]) -> None:
        for thread in threads:
            thread.leave()
        self._context.dispatcher.dismiss_workers([thread.slot for thread in threads])
