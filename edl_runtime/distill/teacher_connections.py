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
from edl_runtime.errors import SpecError
from edl_runtime.log import get_logger
from edl_runtime.protocol.errors import InferenceError, ModelNotReadyError, ProtocolError
from edl_runtime.protocol.oip import ModelSignature, Normalise, TopK
from edl_runtime.protocol.tensors import Tensor
from edl_runtime.registry.members import signature_differences

FIRST_QUARANTINE_S = 0.1
LONGEST_QUARANTINE_S = 30.0
"""Each quarantine of a teacher lasts twice as long as the one before, up to this."""

QUARANTINE_JITTER = 1.25
"""A quarantine is randomly up to so many times longer: teachers that are always probed at the same time would each get
the same request as the last time, and a request that all of them fail would not be found."""

PROBATION = 5
"""After so many times the next quarantine without a failure, the next one is short again. A teacher that answers
wrongly now and then thus loses about a tenth of its time, and one that always does most of it."""

MAX_BROKEN_CONNECTIONS = 3
"""A teacher that breaks so many connections without an answer in between goes into quarantine. Must exceed the
connections to a teacher, which all break when it is killed."""

log = get_logger(__name__)


class TeacherHealth:
    """The health of one teacher; safe from any thread.

    A teacher that answers wrongly, with an error or not at all goes into quarantine. After that one of its connections
    probes it: it has to be ready and to answer one request correctly, and is then used as before. A request that it
    fails in a probe goes to another teacher, so a probe loses nothing.

    - `may_send`: set while it is not in quarantine, and once it is retired.
    - `reason`: why it is in quarantine; empty if it is not.
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
        """Return the seconds until the teacher may be probed; 0 if it may get requests now."""
        return max(0.0, self._due_at - now) if self.reason else 0.0

    def quarantine(self, reason: str) -> None:
        """Put it into quarantine, for longer than the last time, because it answered wrongly or not at all."""
        with self._lock:
            now = time.monotonic()
            if self._retired or self.probe_due_in_s(now) > 0:
                return  # or another of its connections has put it there
            if not self.reason and now - self._recovered_at >= PROBATION * self._quarantine_s:
                self._quarantine_s = FIRST_QUARANTINE_S
            log.warning("teacher.quarantined", teacher=self.address, cause=reason, rest_s=self._quarantine_s)
            self.reason = reason
            self.may_send.clear()
            self._due_at = now + self._quarantine_s * random.uniform(1, QUARANTINE_JITTER)  # noqa: S311 - no secret
            self._quarantine_s = min(2 * self._quarantine_s, LONGEST_QUARANTINE_S)

    def note_broken_connection(self, reason: str) -> None:
        """Count a connection that it closed during a request: it was killed, or does so repeatedly."""
        with self._lock:
            self._broken_connections += 1
            too_often = self._broken_connections >= MAX_BROKEN_CONNECTIONS
        if too_often:
            self.quarantine(reason)

    def note_answer(self, sent_at: float) -> None:
        """Note a correct answer to a request sent at that time; cheap enough for each answer."""
        if not self.reason and not self._broken_connections:
            return
        with self._lock:
            self._broken_connections = 0
            if not self.reason or sent_at < self._due_at:  # sent before the quarantine ended, so not a probe
                return
            log.info("teacher.recovered", teacher=self.address)
            self.reason = ""
            self._recovered_at = time.monotonic()
            self.may_send.set()

    def retire(self) -> None:
        """Stop using it: wake the workers that wait for its recovery."""
        with self._lock:
            self._retired = True
            self.may_send.set()


# Workers

FIRST_RECONNECT_S = 0.1
LONGEST_RECONNECT_S = 1.0

BUSY_STATUSES = frozenset({408, 429, 502, 503, 504})
"""Statuses of a teacher that is busy or unavailable, which say nothing about the request or the model."""


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
    """Raised in a worker for a teacher that responds but can't be used: not ready, or with another model."""


class InQuarantineError(Exception):
    """Raised in a worker when another worker has put the same teacher into quarantine."""


class WorkerContext(NamedTuple):
    """What all workers of a pool share.

    - `plan_of`: returns what to request from teachers with a signature; its errors go to the training script.
    - `fail`: raises an error in the training script.
    """

    dispatcher: Dispatcher
    connect: Connect
    plan_of: Callable[[ModelSignature], RequestPlan]
    fail: Callable[[BaseException], None]


_FAILURES = (OSError, ProtocolError, InferenceError, ModelNotReadyError, UnusableTeacherError)


class TeacherWorker(threading.Thread):
    """Sends requests of its dispatcher to one teacher. `gone` is set when the worker has to end.

    The workers of a teacher share its `health`; the one with `number` 0 probes it.
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
        """End after the current request; doesn't wait. All workers of a teacher leave together."""
        self.gone.set()
        self.health.retire()  # wakes workers that wait for the end of a quarantine

    def disconnect(self) -> None:
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
        except Exception as error:  # noqa: BLE001 -- raised in the training script
            self._fail(error)
        finally:
            thread_ends_here()  # the teacher may be a Paddle model in this process

    def _await_probe(self) -> None:
        if self.health.reason and self._probes:
            self.gone.wait(self.health.probe_due_in_s(time.monotonic()))
        elif self.health.reason:
            self.health.may_send.wait()

    def _serve(self) -> None:
        self._connection = connection = self._connect(self._address)
        with contextlib.closing(connection):
            if self.gone.is_set():  # `disconnect` may have run before the connection was set
                return
            connection.open()
            if not connection.ready():
                raise UnusableTeacherError("it is not ready")
            plan = self._plan_of(self._agreed(self._told(connection)))
            self._dispatcher.add_worker(self.slot)
            try:
                self._answer_requests(connection, plan)
            except _FAILURES as error:
                self._dispatcher.report_unavailable(self._describe(error))
                raise
            finally:
                self._dispatcher.remove_worker(self.slot)

    def _told(self, connection: InferenceConnection) -> ModelSignature:
        """Return the signature; a server that tells none any more, as its address relies on, ends no training."""
        try:
            return connection.signature()
        except SpecError as error:
            if self._dispatcher.signature is None:
                raise
            raise UnusableTeacherError(str(error)) from None

    def _agreed(self, signature: ModelSignature) -> ModelSignature:
        agreed = self._dispatcher.agree_on_signature(signature)
        if agreed != signature and (unlike := signature_differences(agreed, signature)):
            raise UnusableTeacherError(f"its model differs from the others': {'; '.join(unlike)}")
        return agreed

    def _answer_requests(self, connection: InferenceConnection, plan: RequestPlan) -> None:
        while (request := self._dispatcher.take_request(self.slot)) is not None:
            if not self._may_send():
                raise InQuarantineError
            self._answer(request, connection, plan)
            del request  # frees its batch while this waits for the next request

    def _may_send(self) -> bool:
        health = self.health
        return not health.reason or (self._probes and not health.probe_due_in_s(time.monotonic()))

    def _answer(self, request: Request, connection: InferenceConnection, plan: RequestPlan) -> None:
        try:
            answers = connection.infer(request.inputs, plan.requested, plan.normalise, alone=bool(request.deaths))
            plan.check(self._address, answers, request.rows)
        except InferenceError as error:
            is_busy = error.retryable and not error.predictor_died and error.status in BUSY_STATUSES
            if is_busy or not self._dispatcher.fail_request(self.slot, error):
                raise
            return
        except ProtocolError as error:
            self._dispatcher.fail_request(self.slot, error)
            raise
        except OSError as error:
            if not isinstance(error, TimeoutError) and not self.gone.is_set():
                self.health.note_broken_connection(self._describe(error))
            raise
        # Cached before the script gets the answers, which it may write to. Not cached if the script has another
        # teacher's answers: it may have written to the inputs before this teacher got them.
        if request.cache_writer is not None and not request.settled:
            request.cache_writer(answers)
        self._dispatcher.complete(self.slot, answers)
        self.health.note_answer(self.slot.sent_at)
        self._retry_s = FIRST_RECONNECT_S
        self._away = False

    def _back_off(self, error: Exception) -> None:
        """Put the teacher into quarantine, or wait before the next try."""
        cause = self._describe(error)
        self._dispatcher.report_unavailable(cause)
        if isinstance(error, TimeoutError | ProtocolError) or (
            isinstance(error, InferenceError) and error.status not in BUSY_STATUSES
        ):
            self.health.quarantine(cause)
            return
        if not self._away:
            log.warning("teacher.disconnected", teacher=self._address, cause=cause, retry_in_s=self._retry_s)
        self._away = True
        self.gone.wait(self._retry_s)
        self._retry_s = min(2 * self._retry_s, LONGEST_RECONNECT_S)

    def _describe(self, error: Exception) -> str:
        text = str(error) or type(error).__name__
        return text if self._address in text else f"{self._address}: {text}"


# Pool of workers


WORKERS_PER_TEACHER = 2
"""While one request is transferred, the teacher runs the other."""


class TeacherPool:
    """The workers of one pool's teachers."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._lock = threading.RLock()  # reentrant: the garbage collector may stop it from inside
        self._in_use: dict[str, list[TeacherWorker]] = {}
        self._threads: list[TeacherWorker] = []  # including those that finish their last request
        self._closed = False

    def use(self, addresses: Collection[str]) -> None:
        """Use these teachers and no others; workers of others finish their requests. Doesn't wait."""
        with self._lock:
            if self._closed:
                return
            leaving = [worker for address in self._in_use.keys() - addresses for worker in self._in_use.pop(address)]
            new = [worker for address in addresses if address not in self._in_use for worker in self._add(address)]
        self._dismiss(leaving)
        for worker in new:
            worker.start()
        if not addresses:
            self._context.dispatcher.report_unavailable("no teacher is registered")

    def quarantined(self) -> dict[str, str]:
        """Return the teachers in use that are in quarantine, address → reason."""
        with self._lock:
            health_by_address = {address: workers[0].health for address, workers in self._in_use.items()}
        return {address: health.reason for address, health in health_by_address.items() if health.reason}

    def stop(self) -> None:
        """Disconnect from all teachers, even during requests. Doesn't wait."""
        with self._lock:
            self._closed = True
            self._in_use.clear()
            threads = list(self._threads)
        self._dismiss(threads)
        for thread in threads:
            thread.disconnect()

    def join(self, until: float) -> None:
        """Wait for all threads to end, until the monotonic time `until`."""
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
