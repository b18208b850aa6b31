"""The teacher's HTTP server: the Open Inference Protocol v2 over HTTP/1.1.

The model runs in other processes, so that connections, health and the lease stay responsive meanwhile.

Bodies are received straight into the arena and answers are sent straight from it, so that large tensors are not copied.
Exceptions: TLS; before Python 3.12, the part of an answer that asyncio has to buffer; and a body that arrives slowly
while others wait for its slot, which is received into a side buffer and copied when it is complete.
"""

from __future__ import annotations

import asyncio
import enum
import sys

from edl_runtime.log import get_logger
from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.http_heads import (
    CONTENT_LENGTH,
    HEAD_LIMIT,
    JSON_SIZE,
    RUN_ALONE,
    ReadBuffer,
    RequestHead,
)
from edl_runtime.protocol.infer_messages import REQUEST_JSON_LIMIT
from edl_runtime.protocol.listener import ConnectionTable
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.shared_memory import REGISTER_PATH
from edl_runtime.teacher.http.admission import (
    MAX_SIDE_BYTES,
    MAX_STALLED_CHECKS,
    MAX_STALLED_CHECKS_CONTESTED,
    MIN_BYTES_CONTESTED,
    STALL_CHECK_S,
    ClientProgress,
    SideMemory,
    SlotQueue,
    StallDetector,
    unsent_bytes,
)
from edl_runtime.teacher.http.routes import LEAVING, Reply, Routes, answer_head, refusal, render
from edl_runtime.teacher.metrics import TeacherMetrics
from edl_runtime.teacher.predictor.execute import EncodedAnswer, encode_refusal
from edl_runtime.teacher.predictor.pool import Runner
from edl_runtime.teacher.shm.arena import Arena
from edl_runtime.teacher.shm.regions import REGISTRATION_LIMIT, MappedRegion, RegionTable

BODY_LIMIT = 1 << 30
"""Most bytes of a request's body, and of an answer's."""

MOST_CONNECTIONS = 512

COPY_PIECE = 4 * 1024 * 1024
"""Bytes of a side buffer that are copied at a time: a few milliseconds, so that the event loop is not blocked."""

_LINGER_S = 2.0  # for the client to read the answer before the socket is closed
_SMALL_ANSWER = 128 * 1024  # bytes; copying so many is cheaper than a second system call
_NOTHING = memoryview(b"")

_TLS_PIECE = 64 * 1024
"""Bytes of an answer that are passed to TLS at a time: it encrypts and buffers all of them at once."""

log = get_logger(__name__)


class HttpServer:
    """The state that all connections of a teacher share."""

    def __init__(
        self,
        signature: ModelSignature,
        runner: Runner,
        arena: Arena,
        metrics: TeacherMetrics | None = None,
        *,
        token: str = "",
        check_s: float = STALL_CHECK_S,
        most_connections: int = MOST_CONNECTIONS,
        max_side_bytes: int = MAX_SIDE_BYTES,
    ) -> None:
        """Serve `signature` by `runner`, whose requests lie in `arena`: the size of its areas limits bodies.

        `metrics` are served at /metrics, with gauges of the server.
        """
        self.metrics = metrics = metrics or TeacherMetrics()
        metrics.gauges["edl_teacher_connections"] = "Connected clients.", lambda: len(self.connections)
        metrics.gauges["edl_teacher_requests_in_flight"] = (
            "Requests that are received, wait, run or are answered.",
            lambda: self.slots.in_flight,
        )
        self.regions = RegionTable()
        self.routes = Routes(signature, token, metrics=metrics, shares_memory=self.regions.available)
        self.runner = runner
        self.arena = arena
        self.slots = SlotQueue(arena)
        self.side_memory = SideMemory(max_side_bytes)
        self.draining = False
        self.connections: ConnectionTable[ClientConnection] = ConnectionTable(most_connections)
        self._check_s = check_s

    def connect(self) -> ClientConnection:
        """Return a connection for a new client; called by `edl_runtime.protocol.listener`."""
        return ClientConnection(self)

    async def drain(self, limit_s: float) -> bool:
        """Refuse new requests, answer those in flight, then disconnect. Return whether `limit_s` was enough."""
        self.draining = True
        answered = await self.slots.all_answered(limit_s)
        if not answered:
            log.warning("teacher.not_drained", in_flight=self.slots.in_flight, limit_s=limit_s)
        for connection in self.connections:
            connection.end()
        return answered

    async def watch(self) -> None:
        """Disconnect stalled clients; runs until cancelled."""
        while True:
            await asyncio.sleep(self._check_s)
            self.end_stalled()

    def end_stalled(self) -> None:
        """Check all clients once, and disconnect those that have stalled for too long.

        When bodies arrive too slowly for slots that others wait for, they and all waiting bodies move to side buffers:
        then only complete requests take slots, however many clients are slow.
        """
        # Slots are given back last: by then, incomplete bodies that waited for one are in side buffers, too.
        slow = [connection for connection in self.connections if connection.check_progress()]
        for connection in slow:
            connection.move_aside()
        if slow:
            for connection in self.connections:
                connection.move_aside_if_waiting()
        for connection in slow:
            connection.leave_slot()


class _Phase(enum.Enum):
    HEAD = enum.auto()  # reading a head, or waiting for one
    ARRIVING = enum.auto()  # reading the beginning of a body into the read buffer, without a slot
    WAITING = enum.auto()  # for a slot
    BODY = enum.auto()  # reading a body into the slot
    ASIDE = enum.auto()  # reading a body into a side buffer
    COPYING = enum.auto()  # copying it from there into the slot
    RUNNING = enum.auto()  # the runner has the request
    SENDING = enum.auto()  # the network has not taken all of the answer
    LINGERING = enum.auto()  # closing: further input is dropped until the client has read the answer


_RECEIVING = (_Phase.BODY, _Phase.ASIDE)  # a tuple: hashing a member costs more than comparing two
_ANSWERED = (_Phase.HEAD, _Phase.SENDING, _Phase.LINGERING)


class ClientConnection(asyncio.BufferedProtocol):
    """One client. Its requests are answered one at a time, in order.

    `known`: a request had the token, or none is required.
    """

    def __init__(self, server: HttpServer) -> None:
        self.alive = True
        self.known = False
        self._server = server
        self._phase = _Phase.HEAD
        self._ahead = ReadBuffer()
        self._slot = -1
        self._region: MappedRegion | None = None  # the shared memory that the client has registered last
        self._registers = self._alone = False
        self._body = self._unsent = _NOTHING
        self._heads = self._size = self._received = self._answer_size = 0
        self._json_size: int | None = None
        self._keep_alive = True
        self._stall = StallDetector()
        self._advancing = False
        self._paused = False
        self._backed_up = False

    # called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # a socket's transport is one
        secured = transport.get_extra_info("sslcontext") is not None
        # `resume_writing` then means that an answer has left its slot. TLS pauses at the limit, plain sockets above it.
        self._transport.set_write_buffer_limits(high=1 if secured else 0)
        self._piece = _TLS_PIECE if secured else sys.maxsize
        self._server.connections.handshake_done(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        if self._phase in _RECEIVING:
            return self._body[self._received :]
        return self._ahead.room()

    def buffer_updated(self, nbytes: int) -> None:
        if self._phase in _RECEIVING:
            self._received += nbytes
            if self._received == self._size:
                if self._phase is _Phase.BODY:
                    self._run()
                else:
                    self._take_slot()
            return
        if self._phase is _Phase.LINGERING:
            return
        self._ahead.grow(nbytes)
        if self._phase is _Phase.HEAD:
            self._advance()
            return
        if self._phase is _Phase.ARRIVING:
            self._take_slot_if_due()
        self._pause_while_full()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.alive = False
        self._server.connections.remove(self)
        self._close_region()
        if self._phase in (_Phase.ARRIVING, _Phase.WAITING, _Phase.ASIDE):
            self._forget_body()
        elif self._phase in (_Phase.BODY, _Phase.COPYING, _Phase.SENDING):
            self._return_slot()
        elif self._phase is _Phase.RUNNING:
            self._server.runner.drop(self._slot)

    def pause_writing(self) -> None:
        self._backed_up = True

    def resume_writing(self) -> None:
        self._backed_up = False
        if self._phase is _Phase.SENDING:
            self._send_on()

    # called by the server

    @property
    def idle(self) -> bool:
        """Whether no complete request waits for its answer."""
        return self._phase in (_Phase.HEAD, _Phase.ARRIVING, _Phase.ASIDE)

    @property
    def stalled_for(self) -> int:
        """Number of checks in a row that found it stalled, 0 if fewer than MAX_STALLED_CHECKS_CONTESTED."""
        checks = self._stall.current(self._progress())
        return checks if checks >= MAX_STALLED_CHECKS_CONTESTED else 0

    def end(self) -> None:
        """Answer a pending request with 503, then disconnect when all is sent."""
        if self._phase not in _ANSWERED:
            self._server.metrics.count_answer(LEAVING.status)
            self._transport.write(render(LEAVING, keep_alive=False))
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    @property
    def slow(self) -> bool:
        """Whether less than MIN_BYTES_CONTESTED moved between the last two checks while the teacher waited for it."""
        return self._stall.moved is not None and self._stall.moved < MIN_BYTES_CONTESTED

    @property
    def bytes_to_come(self) -> int:
        """Bytes of the body that have not arrived yet."""
        return self._size - self._received

    def check_progress(self) -> bool:
        """Disconnect the client if it has stalled for too long.

        Return whether its body arrives too slowly for a slot that others wait for.
        """
        awaited = self._slot >= 0 and self._server.slots.contested
        checks = self._stall.check(self._progress(), MIN_BYTES_CONTESTED if awaited else 1)
        if awaited and self._phase is _Phase.BODY:
            return checks > 0
        if checks >= (MAX_STALLED_CHECKS_CONTESTED if awaited else MAX_STALLED_CHECKS):
            self._transport.abort()
        return False

    def move_aside(self) -> None:
        """Receive the body into a side buffer from now on; without room, disconnect the client if it stays too slow.

        It keeps its slot until `leave_slot`.
        """
        if not self._move_aside(self._body[: self._received]) and self._stall.checks >= MAX_STALLED_CHECKS_CONTESTED:
            self._transport.abort()

    def leave_slot(self) -> None:
        """Give back the slot unless the body is still received into it."""
        if self._phase is not _Phase.BODY:
            slot, self._slot = self._slot, -1
            self._server.slots.give_back(slot, self._size, 0)

    def move_aside_if_waiting(self) -> None:
        """Receive a body that waits for a slot into a side buffer, if there is room."""
        if self._phase is _Phase.WAITING and not self._body and len(self._ahead) < self._size and self._move_aside():
            self._received = self._ahead.take_into(self._body)
            self._pause_while_full()

    def _move_aside(self, received: memoryview = _NOTHING) -> bool:
        """Receive the body, of which `received` has arrived, into a side buffer; return whether there is room."""
        memory = self._server.side_memory.take(self, self._size)
        if memory is None:
            return False
        memory[: len(received)] = received
        self._body = memory
        self._phase = _Phase.ASIDE
        self._server.slots.expect(self)
        return True

    def refuse_body(self) -> None:
        """Answer that there is no room for a body that arrives slowly."""
        self._forget_body()
        self._close_with(refusal(503, "the body arrives too slowly while others wait, and the side buffers are full"))

    def _forget_body(self) -> None:
        """Stop receiving the body and waiting for a slot."""
        self._body = _NOTHING
        self._server.side_memory.give_back(self)
        self._server.slots.leave(self)

    def _progress(self) -> ClientProgress | None:
        """Return how much the client has moved; None while the teacher does not wait for it."""
        is_idle = self._phase is _Phase.HEAD and not self._ahead  # which known clients may be for as long as they like
        if self._phase in (_Phase.WAITING, _Phase.COPYING, _Phase.RUNNING) or (is_idle and self.known):
            return None
        sends = self._phase is _Phase.SENDING
        moved = -len(self._unsent) - unsent_bytes(self._transport) if sends else self._received + len(self._ahead)
        phase = _Phase.BODY if self._phase is _Phase.ASIDE else self._phase
        return ClientProgress((phase, self._heads), moved)

    def begin_body(self, slot: int) -> None:
        """Receive the body into `slot`, or copy it there from its side buffer."""
        self._slot = slot
        area = self._server.arena.request(slot)[: self._size]
        if self._body:
            self._server.side_memory.give_back(self)  # first, so that it is not refused to make room for another
            self._phase = _Phase.COPYING
            self._copy(area, 0)
            return
        self._received = self._ahead.take_into(area)
        self._body = area
        self._phase = _Phase.BODY
        self._pause_while_full()
        if self._received == self._size:
            self._run()

    def _copy(self, area: memoryview, start: int) -> None:
        """Copy a piece of the side buffer, and the rest in later turns of the event loop."""
        if not self.alive:  # the slot was given back, and may be in use for another request
            return
        end = start + COPY_PIECE
        area[start:end] = self._body[start:end]
        if end < self._size:
            asyncio.get_running_loop().call_soon(self._copy, area, end)
            return
        self._body = area
        self._run()

    # from head to answer

    def _advance(self) -> None:
        """Handle the heads in the read buffer."""
        if self._advancing:  # called again by `_sent` of an answer that `_begin` has sent: the loop continues
            return
        self._advancing = True
        while self._phase is _Phase.HEAD and self._ahead and not self._transport.is_closing():
            if not self._ahead.may_be_http:
                reason = "this is not HTTP; does the client use TLS, and this teacher does not?"
                self._close_with(refusal(400, reason), linger=False)
                break
            head = self._ahead.take_head()
            if head is None:
                if len(self._ahead) >= HEAD_LIMIT:
                    self._close_with(refusal(431, f"the head has more than {HEAD_LIMIT} bytes"))
                break
            self._heads += 1
            try:
                self._begin(RequestHead(head))
            except ProtocolError as error:
                self._close_with(refusal(400, str(error)))
        self._advancing = False
        self._pause_while_full()

    def _begin(self, head: RequestHead) -> None:
        """Answer, or receive the body. Raises ProtocolError."""
        size = head.size(CONTENT_LENGTH)
        json_size = head.size(JSON_SIZE)
        self._keep_alive = head.keep_alive
        if admitted := self._server.routes.admits(head):
            self.known = True
            self._server.connections.mark_used(self)
        answer = self._server.routes.route(head, admitted=admitted, draining=self._server.draining)
        if b"transfer-encoding" in head.headers or (size is None and answer is None):
            answer = refusal(411, "send the body with a Content-Length, in one piece")
        self._registers = head.path == REGISTER_PATH
        limit = REGISTRATION_LIMIT if self._registers else self._server.arena.area_size
        if answer is None and size is not None and size > limit:
            answer = refusal(413, f"the body has {size} bytes, allowed are {limit}")
        text_size = json_size if json_size is not None else size or 0
        if answer is None and text_size > REQUEST_JSON_LIMIT:
            allowed = f"allowed are {REQUEST_JSON_LIMIT}; send tensors as binary"
            answer = refusal(413, f"the request has {text_size} bytes of JSON, {allowed}")
        if answer is None:
            self._size, self._json_size, self._answer_size = size or 0, json_size, 0
            self._alone = RUN_ALONE in head.headers
            self._phase = _Phase.ARRIVING
            self._server.slots.expect(self)
            if head.headers.get(b"expect", b"").lower() == b"100-continue":
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._take_slot_if_due()
        elif size or answer.status == 411 or self._server.draining:
            self._close_with(answer)
        else:
            self._server.metrics.count_refusal(answer.status)
            self._transport.write(render(answer, keep_alive=self._keep_alive, method=head.method))
            self._phase = _Phase.SENDING
            self._send_on()

    def _take_slot_if_due(self) -> None:
        """Wait for a slot once the body is there or the read buffer is full: slow clients hold no slot before that."""
        if self._ahead.full or len(self._ahead) >= self._size:
            self._take_slot()

    def _take_slot(self) -> None:
        self._phase = _Phase.WAITING
        self._server.slots.take(self)

    def _run(self) -> None:
        self._phase = _Phase.RUNNING
        if self._registers:
            answer = self._register_region()
            self._server.metrics.count_refusal(answer.status)
            self._send(answer)
            return
        if self._region is not None:
            self._server.arena.regions[self._slot] = self._region
        self._server.arena.alone[self._slot] = self._alone
        self._server.runner.submit(self._slot, self._size, self._json_size, self._send)

    def _register_region(self) -> EncodedAnswer:
        """Register the client's shared memory, in place of its last."""
        try:
            region = self._server.regions.register(self._body)
        except ProtocolError as error:
            return encode_refusal(self._server.arena.answer(self._slot), 400, str(error))
        self._close_region()
        self._region = region
        return EncodedAnswer(200, None, 0)

    def _close_region(self) -> None:
        if self._region is not None:
            self._server.regions.close(self._region)
            self._region = None

    def _send(self, answer: EncodedAnswer) -> None:
        """Send the answer in the slot. A large answer keeps the slot until the network has taken it."""
        self._answer_size = answer.size
        if not self.alive:
            self._return_slot()
            return
        self._keep_alive = self._keep_alive and not self._server.draining
        head = answer_head(answer, keep_alive=self._keep_alive)
        body = self._server.arena.answer(self._slot)[: answer.size]
        self._phase = _Phase.SENDING
        if answer.size <= _SMALL_ANSWER:
            self._transport.write(head + body)  # a copy, so the slot is free from now on
            self._return_slot()
        else:
            self._transport.write(head)
            self._unsent = body
        self._send_on()

    def _send_on(self) -> None:
        """Write as much of the answer as the network takes."""
        while self._unsent and not self._backed_up and self.alive:
            piece, self._unsent = self._unsent[: self._piece], self._unsent[self._piece :]
            self._transport.write(piece)
        if not self._unsent and not self._backed_up and self.alive:
            self._sent()

    def _sent(self) -> None:
        self._phase = _Phase.HEAD if self._keep_alive else _Phase.LINGERING
        self._return_slot()
        if self._keep_alive:
            self._advance()
            return
        self._ahead.clear()
        self._pause_while_full()  # what a client sends after its last request is read and dropped
        # Not now: asyncio may be in the middle of a write, after which Python 3.11 would end the connection once more.
        asyncio.get_running_loop().call_soon(self._transport.close)

    def _close_with(self, answer: Reply, *, linger: bool = True) -> None:
        """Answer and disconnect. `linger`: drop further input for a while first, so that the client reads the answer.

        Closing a socket with unread input resets the connection, and the client may lose the answer.
        """
        self._keep_alive = False
        self._phase = _Phase.LINGERING
        self._ahead.clear()
        self._server.metrics.count_refusal(answer.status)
        self._transport.write(render(answer, keep_alive=False))
        if not linger:
            self._transport.close()
            return
        if self._transport.can_write_eof():  # not in TLS, which ends both directions at once
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)

    def _return_slot(self) -> None:
        if self._slot >= 0:
            slot, self._slot = self._slot, -1
            self._body = self._unsent = _NOTHING
            self._server.slots.give_back(slot, self._size, self._answer_size)

    def _pause_while_full(self) -> None:
        """Pause reading while the read buffer is full."""
        full = self._ahead.full and self._phase is not _Phase.LINGERING
        if full and not self._paused:
            self._transport.pause_reading()
        elif self._paused and not full:
            self._transport.resume_reading()
        self._paused = full
