"""The teachers in use: two connections to each, kept up while the teacher is wanted."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import structlog

from edl_runtime.distill.epoch import Lane
from edl_runtime.distill.feeds import Answers, Plan
from edl_runtime.distill.pipeline import Pipeline
from edl_runtime.errors import InferenceError, ProtocolError
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.tensors import Tensor
from edl_runtime.registry.members import differences

LANES_A_TEACHER = 2
"""While one request is on the wire, the other is being answered."""

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 1.0

FIRST_REST_S = 5.0
LAST_REST_S = 60.0
"""A teacher that let a request time out costs the student the whole time limit, so it is left alone for longer."""

NOT_NOW = frozenset({408, 429, 502, 503, 504})
"""Statuses of a teacher that is busy or away, which tell nothing of the request."""

log = structlog.get_logger(__name__)


class Connection(Protocol):
    """What a lane needs of `edl_runtime.protocol.client.TeacherConnection`."""

    def open(self) -> None: ...
    def close(self) -> None: ...
    def ready(self) -> bool: ...
    def signature(self) -> ModelSignature: ...
    def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> Answers: ...


Connect = Callable[[str], Connection]


class UnusableTeacherError(Exception):
    """Raised inside a lane for a teacher that answers and can't be used now: not ready, or of another model."""


_FAILURES = (OSError, ProtocolError, InferenceError, UnusableTeacherError)


class TeacherPool:
    """Keeps lanes to the wanted teachers; a teacher that fails is tried again, at most a second apart.

    One that lets a request time out rests before it is asked again: `FIRST_REST_S`, twice as long each time that it
    answers nothing in between, `LAST_REST_S` at most.

    `plan_of` tells what is asked of teachers with a signature; what it raises goes to the training script.
    """

    def __init__(self, pipeline: Pipeline, connect: Connect, plan_of: Callable[[ModelSignature], Plan]) -> None:
        self._pipeline = pipeline
        self._connect = connect
        self._plan_of = plan_of
        self._lock = threading.RLock()  # reentrant: the garbage collector may stop it from inside
        self._in_use: dict[str, list[_LaneThread]] = {}
        self._threads: list[_LaneThread] = []  # those too that finish what they are asked
        self._closed = False

    def use(self, addresses: Collection[str]) -> None:
        """Use these teachers and no others; those that leave finish what they are asked. Doesn't wait."""
        with self._lock:
            if self._closed:
                return
            leaving = [lane for address in self._in_use.keys() - addresses for lane in self._in_use.pop(address)]
            coming = [self._add(address) for address in addresses if address not in self._in_use]
        self._dismiss(leaving)
        for lane in (lane for lanes in coming for lane in lanes):
            lane.start()

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

    def _add(self, address: str) -> list[_LaneThread]:
        lanes = [
            _LaneThread(self._pipeline, self._connect, self._plan_of, address, number)
            for number in range(LANES_A_TEACHER)
        ]
        self._in_use[address] = lanes
        self._threads = [*(thread for thread in self._threads if thread.is_alive() or not thread.gone.is_set()), *lanes]
        return lanes

    def _dismiss(self, threads: list[_LaneThread]) -> None:
        for thread in threads:
            thread.gone.set()
        self._pipeline.dismiss([thread.lane for thread in threads])


class _LaneThread(threading.Thread):
    """One connection to one teacher, made anew whenever it breaks. `gone` is set when the lane is to end."""

    def __init__(
        self,
        pipeline: Pipeline,
        connect: Connect,
        plan_of: Callable[[ModelSignature], Plan],
        address: str,
        number: int,
    ) -> None:
        super().__init__(name=f"edl teacher {address} {number}", daemon=True)
        self.lane = Lane(address)
        self.gone = threading.Event()
        self._pipeline = pipeline
        self._connect = connect
        self._plan_of = plan_of
        self._address = address
        self._connection: Connection | None = None
        self._retry_s = FIRST_RETRY_S
        self._rest_s = FIRST_REST_S
        self._failing = False

    def disconnect(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.close()

    def run(self) -> None:
        try:
            while not self.gone.is_set():
                try:
                    self._serve()
                except _FAILURES as error:
                    if not self.gone.is_set():
                        self._wait_after(error)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the training script has to know
            self._pipeline.fail(error)

    def _serve(self) -> None:
        self._connection = connection = self._connect(self._address)
        with contextlib.closing(connection):
            if self.gone.is_set():  # before there was a connection that could be closed
                return
            connection.open()
            if not connection.ready():
                raise UnusableTeacherError("it is not ready")
            plan = self._plan_of(self._agreed(connection.signature()))
            self._pipeline.join(self.lane)
            try:
                self._answer_requests(connection, plan)
            except _FAILURES as error:
                self._pipeline.lacks(self._in_words(error))
                raise
            finally:
                self._pipeline.part(self.lane)

    def _agreed(self, signature: ModelSignature) -> ModelSignature:
        agreed = self._pipeline.agree(signature)
        if agreed != signature and (unlike := differences(agreed, signature)):
            raise UnusableTeacherError(f"it has another model than the others: {'; '.join(unlike)}")
        return agreed

    def _answer_requests(self, connection: Connection, plan: Plan) -> None:
        outputs = [answer.name for answer in plan.answers]
        while (request := self._pipeline.take(self.lane)) is not None:
            try:
                answers = connection.infer(request.inputs, outputs)
                plan.check(self._address, answers, request.rows)
            except InferenceError as error:
                if not error.retryable:
                    self._pipeline.refuse(self.lane, error)
                    continue
                if error.status not in NOT_NOW:
                    self._pipeline.fail_request(self.lane, error)
                raise
            except ProtocolError as error:
                self._pipeline.fail_request(self.lane, error)
                raise
            except TimeoutError:
                self._retry_s = self._rest_s
                self._rest_s = min(2 * self._rest_s, LAST_REST_S)
                raise
            self._pipeline.answer(self.lane, answers)
            if self._failing:
                self._recover()

    def _recover(self) -> None:
        log.info("teacher.recovered", teacher=self._address)
        self._failing = False
        self._retry_s = FIRST_RETRY_S
        self._rest_s = FIRST_REST_S

    def _wait_after(self, error: Exception) -> None:
        cause = self._in_words(error)
        if not self._failing:
            log.warning("teacher.failed", teacher=self._address, cause=cause, retry_in_s=self._retry_s)
        self._failing = True
        self._pipeline.lacks(cause)
        self.gone.wait(self._retry_s)
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)  # after a rest, too, the next try comes soon

    def _in_words(self, error: Exception) -> str:
        return f"{self._address}: {error or type(error).__name__}"
