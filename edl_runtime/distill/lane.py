"""One connection to one teacher, in a thread of its own, made anew whenever it breaks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from edl_runtime.distill.batches import Request
from edl_runtime.distill.dispatcher import Dispatcher
from edl_runtime.distill.epoch import Lane
from edl_runtime.distill.feeds import Answers, Plan
from edl_runtime.distill.health import Health
from edl_runtime.distill.processes import ends_here
from edl_runtime.errors import InferenceError, ProtocolError
from edl_runtime.log import get_logger
from edl_runtime.protocol.oip import ModelSignature, Normalise, TopK
from edl_runtime.protocol.tensors import Tensor
from edl_runtime.registry.members import differences

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 1.0

NOT_NOW = frozenset({408, 429, 502, 503, 504})
"""Statuses of a teacher that is busy or away, which tell nothing of the request or the model."""

log = get_logger(__name__)


class Connection(Protocol):
    """What a lane needs of `edl_runtime.protocol.client.TeacherConnection`."""

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


Connect = Callable[[str], Connection]


class UnusableTeacherError(Exception):
    """Raised inside a lane for a teacher that answers and can't be used now: not ready, or of another model."""


class InQuarantineError(Exception):
    """Raised inside a lane when another lane of the same teacher has found that it misbehaves."""


class Asking(NamedTuple):
    """What all lanes of a pool share: where requests come from and answers go.

    - `plan_of`: tells what is asked of teachers with a signature; what it raises goes to the training script.
    - `fail`: takes what the training script has to know.
    """

    dispatcher: Dispatcher
    connect: Connect
    plan_of: Callable[[ModelSignature], Plan]
    fail: Callable[[BaseException], None]


_FAILURES = (OSError, ProtocolError, InferenceError, UnusableTeacherError)


class LaneThread(threading.Thread):
    """Asks one teacher what its dispatcher has for it. `gone` is set when the lane is to end.

    The lanes of a teacher share its `health`; that with `number` 0 is the one that probes it.
    """

    def __init__(self, asking: Asking, health: Health, number: int) -> None:
        super().__init__(name=f"edl teacher {health.address} {number}", daemon=True)
        self.lane = Lane(health.address)
        self.health = health
        self.gone = threading.Event()
        self._dispatcher, self._connect, self._plan_of, self._fail = asking
        self._address = health.address
        self._probes = number == 0
        self._connection: Connection | None = None
        self._retry_s = FIRST_RETRY_S
        self._away = False

    def leave(self) -> None:
        """End once what is asked now is answered; doesn't wait. All lanes of a teacher leave together."""
        self.gone.set()
        self.health.retire()  # whose end a lane may be waiting for

    def disconnect(self) -> None:
        """Disconnect, in the middle of a request or not."""
        connection = self._connection
        if connection is not None:
            connection.close()

    def run(self) -> None:
        try:
            while True:
                self._await_turn()
                if self.gone.is_set():
                    break
                try:
                    self._serve()
                except InQuarantineError:
                    continue
                except _FAILURES as error:
                    if not self.gone.is_set():
                        self._judge(error)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the training script has to know
            self._fail(error)
        finally:
            ends_here()  # a teacher within this process may be a model of Paddle

    def _await_turn(self) -> None:
        if self.health.reason and self._probes:
            self.gone.wait(self.health.due_in_s(time.monotonic()))
        elif self.health.reason:
            self.health.out.wait()

    def _serve(self) -> None:
        self._connection = connection = self._connect(self._address)
        with contextlib.closing(connection):
            if self.gone.is_set():  # before there was a connection that could be closed
                return
            connection.open()
            if not connection.ready():
                raise UnusableTeacherError("it is not ready")
            plan = self._plan_of(self._agreed(connection.signature()))
            self._dispatcher.join(self.lane)
            try:
                self._answer_requests(connection, plan)
            except _FAILURES as error:
                self._dispatcher.lacks(self._in_words(error))
                raise
            finally:
                self._dispatcher.part(self.lane)

    def _agreed(self, signature: ModelSignature) -> ModelSignature:
        agreed = self._dispatcher.agree(signature)
        if agreed != signature and (unlike := differences(agreed, signature)):
            raise UnusableTeacherError(f"it has another model than the others: {'; '.join(unlike)}")
        return agreed

    def _answer_requests(self, connection: Connection, plan: Plan) -> None:
        while (request := self._dispatcher.take(self.lane)) is not None:
            if not self._may_ask():
                raise InQuarantineError
            self._answer(request, connection, plan)
            del request  # which holds a whole batch, and the next may be long in coming

    def _may_ask(self) -> bool:
        health = self.health
        return not health.reason or (self._probes and not health.due_in_s(time.monotonic()))

    def _answer(self, request: Request, connection: Connection, plan: Plan) -> None:
        try:
            answers = connection.infer(request.inputs, plan.wishes, plan.normalise, alone=bool(request.deaths))
            plan.check(self._address, answers, request.rows)
        except InferenceError as error:
            if self._excuses(error):
                return
            raise
        except ProtocolError as error:
            self._dispatcher.fail_request(self.lane, error)
            raise
        except OSError as error:
            if not isinstance(error, TimeoutError) and not self.gone.is_set():
                self.health.broke(self._in_words(error))
            raise
        # Kept before the training script has the answers, which may write to them; and not if it has another
        # teacher's, for then it may have written to the inputs, too, before they were sent.
        if request.memo is not None and not request.settled:
            request.memo.keep(answers)
        self._dispatcher.answer(self.lane, answers)
        self.health.answered(self.lane.asked_at)
        self._retry_s = FIRST_RETRY_S
        self._away = False

    def _excuses(self, error: InferenceError) -> bool:
        """Say what became of the request; return whether that, and not the teacher, is to blame."""
        if error.predictor_died:
            self._dispatcher.note_death(self.lane, error)
            return False
        if not error.retryable:
            return self._dispatcher.refuse_request(self.lane, error)
        return error.status not in NOT_NOW and self._dispatcher.fail_request(self.lane, error)

    def _judge(self, error: Exception) -> None:
        """Wait before the next try, in quarantine or not."""
        cause = self._in_words(error)
        self._dispatcher.lacks(cause)
        if isinstance(error, TimeoutError | ProtocolError) or (
            isinstance(error, InferenceError) and error.status not in NOT_NOW
        ):
            self.health.misbehaved(cause)
            return
        if not self._away:
            log.warning("teacher.away", teacher=self._address, cause=cause, retry_in_s=self._retry_s)
        self._away = True
        self.gone.wait(self._retry_s)
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    def _in_words(self, error: Exception) -> str:
        words = str(error) or type(error).__name__
        return words if self._address in words else f"{self._address}: {words}"
