"""The front of a teacher: the Open Inference Protocol v2 over HTTP/1.1.

Bodies are received straight into shared memory and answers sent straight from it, so that large tensors are not
copied; the model runs elsewhere, so that connections, health and the lease go on meanwhile.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque

import structlog

from edl_runtime.errors import ProtocolError
from edl_runtime.protocol.http import CONTENT_LENGTH, END_OF_HEAD, HEAD_LIMIT, JSON_SIZE, RequestHead, render_response
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.teacher.answering import Answer
from edl_runtime.teacher.arena import Arena
from edl_runtime.teacher.routes import Reply, Routes, refusal
from edl_runtime.teacher.runner import Runner

BODY_LIMIT = 1 << 30
"""Most bytes of a request's body, and of an answer's."""

STALL_S = 30.0
"""A client that is silent for so long in the middle of a request is disconnected."""

_READ_AHEAD = 64 * 1024
_LINGER_S = 2.0
_SMALL_ANSWER = 128 * 1024  # bytes; copying these behind their head is cheaper than a second system call

log = structlog.get_logger(__name__)


class Front:
    """What all connections of a teacher share. It makes a `Connection` for each client."""

    def __init__(
        self, signature: ModelSignature, runner: Runner, arena: Arena, *, token: str = "", stall_s: float = STALL_S
    ) -> None:
        """Serve `signature` by `runner`, whose requests lie in `arena`: its areas are the limit of a body."""
        self.routes = Routes(signature, token)
        self.runner = runner
        self.arena = arena
        self.draining = False
        self.connections: set[Connection] = set()
        self._stall_s = stall_s
        self._free = list(range(arena.slots))
        self._waiting: deque[Connection] = deque()
        self._in_flight = 0
        self._answered_all = asyncio.Event()

    def connect(self) -> Connection:
        """Return a connection for a new client, as `loop.create_server` asks for it."""
        return Connection(self)

    def take_slot(self, connection: Connection) -> None:
        """Give `connection` a slot by its `begin_body`, now or as soon as one is free."""
        self._in_flight += 1
        if self._free:
            connection.begin_body(self._free.pop())
        else:
            self._waiting.append(connection)

    def return_slot(self, slot: int, request_size: int, answer_size: int) -> None:
        """Take back the slot of a request that has been answered, or whose client is gone."""
        self._in_flight -= 1
        self.arena.give_back(slot, request_size, answer_size)
        while self._waiting:
            connection = self._waiting.popleft()
            if connection.alive:
                connection.begin_body(slot)
                return
            self._in_flight -= 1
        self._free.append(slot)
        if not self._in_flight:
            self._answered_all.set()

    async def drain(self, limit_s: float) -> bool:
        """Answer what is in flight and refuse the rest, then disconnect. Whether all was answered within `limit_s`."""
        self.draining = True
        if self._in_flight:
            self._answered_all.clear()
            try:
                async with asyncio.timeout(limit_s):
                    await self._answered_all.wait()
            except TimeoutError:
                log.warning("teacher.not_drained", in_flight=self._in_flight, limit_s=limit_s)
        for connection in list(self.connections):
            connection.end()
        return not self._in_flight

    async def disconnect_stalled(self) -> None:
        """Disconnect clients that went silent in the middle of a request; runs until cancelled."""
        while True:
            await asyncio.sleep(self._stall_s)
            for connection in list(self.connections):
                connection.end_if_stalled()


class _Phase(enum.Enum):
    HEAD = enum.auto()  # reading a head, or waiting for one
    WAITING = enum.auto()  # for a slot
    BODY = enum.auto()  # reading a body into the slot
    RUNNING = enum.auto()  # the runner has the request
    SENDING = enum.auto()  # the answer has not all been taken by the network
    LINGERING = enum.auto()  # answered and done; what the client still sends is dropped until it has read that


class Connection(asyncio.BufferedProtocol):
    """One client: its requests are answered one after the other, in order."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._phase = _Phase.HEAD
        self._ahead = bytearray(_READ_AHEAD)
        self._view = memoryview(self._ahead)
        self._start = self._end = 0  # what has been read and not been used
        self._slot = -1
        self._body = self._view[:0]
        self._size = self._received = self._answer_size = 0
        self._json_size: int | None = None
        self._keep_alive = True
        self._seen_by_watch = -1
        self._advancing = False
        self._paused = False
        self._backed_up = False
        self.alive = True

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # a socket's transport is one
        self._transport.set_write_buffer_limits(high=0)  # so that we learn when an answer has left its slot
        self._front.connections.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        if self._phase is _Phase.BODY:
            return self._body[self._received :]
        if self._phase is _Phase.LINGERING:
            return self._view
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._phase is _Phase.BODY:
            self._received += nbytes
            if self._received == self._size:
                self._run()
            return
        if self._phase is _Phase.LINGERING:
            return
        self._end += nbytes
        if self._phase is _Phase.HEAD:
            self._advance()
        else:
            self._make_room()

    def eof_received(self) -> None:
        """Let asyncio close the connection: nobody is left to answer."""

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.alive = False
        self._front.connections.discard(self)
        if self._phase in (_Phase.BODY, _Phase.SENDING):
            self._return_slot()

    def pause_writing(self) -> None:
        self._backed_up = True

    def resume_writing(self) -> None:
        self._backed_up = False
        if self._phase is _Phase.SENDING:
            self._sent()

    # what the front calls

    def end(self) -> None:
        """Disconnect, when what has been written is sent."""
        self._transport.close()

    def end_if_stalled(self) -> None:
        """Disconnect if nothing of a request under way has come since this was last called."""
        halfway = self._phase is _Phase.BODY or (self._phase is _Phase.HEAD and self._end > self._start)
        progress = self._received + self._end if halfway else -1
        if halfway and progress == self._seen_by_watch:
            self._transport.abort()
        self._seen_by_watch = progress

    def begin_body(self, slot: int) -> None:
        """Receive the body into `slot`, with what of it came along with the head."""
        self._slot = slot
        self._body = self._front.arena.request(slot)[: self._size]
        self._received = min(self._end - self._start, self._size)
        self._body[: self._received] = self._view[self._start : self._start + self._received]
        self._start += self._received
        self._phase = _Phase.BODY
        self._make_room()
        if self._received == self._size:
            self._run()

    # from head to answer

    def _advance(self) -> None:
        """Deal with the heads that have been read."""
        if self._advancing:
            return
        self._advancing = True
        while self._phase is _Phase.HEAD and self._end > self._start and not self._transport.is_closing():
            end = self._ahead.find(END_OF_HEAD, self._start, min(self._end, self._start + HEAD_LIMIT))
            if end < 0:
                self._wait_for_more()
                break
            head = bytes(self._view[self._start : end + len(END_OF_HEAD)])
            self._start = end + len(END_OF_HEAD)
            try:
                self._begin(RequestHead(head))
            except ProtocolError as error:
                self._close_with(refusal(400, str(error)))
        self._advancing = False
        self._make_room()

    def _wait_for_more(self) -> None:
        if self._end - self._start >= HEAD_LIMIT:
            self._close_with(refusal(431, f"the head has more than {HEAD_LIMIT} bytes"))

    def _begin(self, head: RequestHead) -> None:
        """Answer, or take the body. Raises ProtocolError."""
        size = head.size(CONTENT_LENGTH)
        json_size = head.size(JSON_SIZE)
        self._keep_alive = head.keep_alive
        answer = self._front.routes.route(head, draining=self._front.draining)
        if b"transfer-encoding" in head.headers or (size is None and answer is None):
            answer = refusal(411, "send the body with a Content-Length, in one piece")
        elif answer is None and size is not None and size > self._front.arena.area_size:
            answer = refusal(413, f"the body has {size} bytes, allowed are {self._front.arena.area_size}")
        if answer is None:
            self._size, self._json_size, self._answer_size = size or 0, json_size, 0
            self._phase = _Phase.WAITING
            if head.headers.get(b"expect", b"").lower() == b"100-continue":
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._front.take_slot(self)
        elif size or answer.status == 411 or self._front.draining:
            self._close_with(answer)
        else:
            self._transport.write(self._render(answer))
            self._phase = _Phase.SENDING
            if not self._backed_up:
                self._sent()

    def _run(self) -> None:
        self._phase = _Phase.RUNNING
        self._front.runner.submit(self._slot, self._size, self._json_size, self._send)

    def _send(self, answer: Answer) -> None:
        """Send the answer that lies in the slot, and keep the slot until it has left."""
        self._answer_size = answer.size
        if not self.alive:
            self._return_slot()
            return
        headers: dict[str, str | int] = {"Content-Type": "application/json", "Content-Length": answer.size}
        if answer.json_size is not None:
            headers["Content-Type"] = "application/octet-stream"
            headers["Inference-Header-Content-Length"] = answer.json_size
        if not self._keep_alive or self._front.draining:
            self._keep_alive = False
            headers["Connection"] = "close"
        head = render_response(answer.status, headers)
        body = self._front.arena.answer(self._slot)[: answer.size]
        self._phase = _Phase.SENDING
        if answer.size <= _SMALL_ANSWER:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        if not self._backed_up and self.alive:
            self._sent()

    def _sent(self) -> None:
        self._phase = _Phase.HEAD
        self._return_slot()
        if not self._keep_alive:
            self._transport.close()
        else:
            self._advance()

    def _close_with(self, answer: Reply) -> None:
        """Answer and disconnect; drop what the client is still sending, so that it gets to read the answer."""
        self._keep_alive = False
        self._phase = _Phase.LINGERING
        self._transport.write(self._render(answer))
        self._transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)

    def _render(self, answer: Reply) -> bytes:
        headers: dict[str, str | int] = {"Content-Type": "application/json", "Content-Length": len(answer.body)}
        if not self._keep_alive:
            headers["Connection"] = "close"
        return render_response(answer.status, {**headers, **answer.headers}) + answer.body

    def _return_slot(self) -> None:
        if self._slot >= 0:
            slot, self._slot = self._slot, -1
            self._body = self._view[:0]
            self._front.return_slot(slot, self._size, self._answer_size)

    def _make_room(self) -> None:
        """Drop what has been used of what was read ahead, and read no further while there is no room."""
        if self._start:
            rest = self._end - self._start
            self._ahead[:rest] = self._ahead[self._start : self._end]
            self._start, self._end = 0, rest
        full = self._end == len(self._ahead) and self._phase is not _Phase.LINGERING
        if full and not self._paused:
            self._transport.pause_reading()
        elif self._paused and not full:
            self._transport.resume_reading()
        self._paused = full
