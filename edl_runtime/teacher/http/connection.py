"""One client's connection to a teacher.

Bodies are received straight into shared memory and answers sent straight from it, so that large tensors are not
copied; except over TLS, and before Python 3.12 what of an answer the network does not take at once: asyncio copies it.
A body that comes slowly while others wait for its slot goes on into memory of its own, and is copied when it is there.
"""

from __future__ import annotations

import asyncio
import enum
import sys
from string import ascii_uppercase
from typing import TYPE_CHECKING, Protocol

from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.http_heads import CONTENT_LENGTH, END_OF_HEAD, HEAD_LIMIT, JSON_SIZE, RUN_ALONE, RequestHead
from edl_runtime.protocol.infer_messages import REQUEST_JSON_LIMIT
from edl_runtime.protocol.shared_memory import REGISTER_PATH
from edl_runtime.teacher.http.admission import (
    MAX_STALLED_CHECKS,
    MAX_STALLED_CHECKS_CONTESTED,
    MIN_BYTES_CONTESTED,
    ClientProgress,
    StallDetector,
    unsent_bytes,
)
from edl_runtime.teacher.http.routes import LEAVING, Reply, answer_head, refusal, render
from edl_runtime.teacher.predictor.execute import EncodedAnswer, encode_refusal
from edl_runtime.teacher.shm.regions import REGISTRATION_LIMIT

if TYPE_CHECKING:
    from edl_runtime.protocol.listener import ConnectionTable
    from edl_runtime.teacher.http.admission import SideBuffers, SlotQueue
    from edl_runtime.teacher.http.routes import Routes
    from edl_runtime.teacher.metrics import TeacherMetrics
    from edl_runtime.teacher.predictor.pool import Runner
    from edl_runtime.teacher.shm.arena import Arena
    from edl_runtime.teacher.shm.regions import MappedRegion, RegionTable

COPY_PIECE = 4 * 1024 * 1024
"""Bytes of a body that are copied into its slot at a time: a few milliseconds."""

_LINGER_S = 2.0
_SMALL_ANSWER = 128 * 1024  # bytes; copying these behind their head is cheaper than a second system call
_NOTHING = memoryview(b"")

_TLS_PIECE = 64 * 1024
"""Bytes of an answer that are given to TLS at a time: it encrypts at once, and keeps, all that it is given."""


class ServerState(Protocol):
    """What a connection needs of its server."""

    draining: bool
    arena: Arena
    connections: ConnectionTable[ClientConnection]
    metrics: TeacherMetrics
    regions: RegionTable
    routes: Routes
    runner: Runner
    side_buffers: SideBuffers
    slots: SlotQueue


class _Phase(enum.Enum):
    HEAD = enum.auto()  # reading a head, or waiting for one
    ARRIVING = enum.auto()  # reading as much of a body as there is room for without a slot
    WAITING = enum.auto()  # for a slot
    BODY = enum.auto()  # reading a body into the slot
    ASIDE = enum.auto()  # reading a body into memory of its own
    COPYING = enum.auto()  # copying it from there into the slot
    RUNNING = enum.auto()  # the runner has the request
    SENDING = enum.auto()  # the answer has not all been taken by the network
    LINGERING = enum.auto()  # answered and done; what the client still sends is dropped until it has read that


_UNANSWERED = frozenset(_Phase) - {_Phase.HEAD, _Phase.SENDING, _Phase.LINGERING}


class ConnectionRegion:
    """What one client shares: the `region` that it has registered last."""

    def __init__(self, regions: RegionTable) -> None:
        self.region: MappedRegion | None = None
        self._regions = regions

    def register(self, body: memoryview, into: memoryview) -> EncodedAnswer:
        """Take the region that a client asks for, in place of its last, and say so in the area `into`."""
        try:
            region = self._regions.register(body)
        except ProtocolError as error:
            return encode_refusal(into, 400, str(error))
        self.close()
        self.region = region
        return EncodedAnswer(200, None, 0)

    def close(self) -> None:
        region, self.region = self.region, None
        if region is not None:
            self._regions.close(region)


class ClientConnection(asyncio.BufferedProtocol):
    """One client: its requests are answered one after the other, in order.

    `known` becomes true with a request that had the token, if one is asked for.
    """

    def __init__(self, server: ServerState) -> None:
        self.alive = True
        self.known = False
        self._server = server
        self._phase = _Phase.HEAD
        self._ahead = ReadBuffer()
        self._slot = -1
        self._shared = ConnectionRegion(server.regions)
        self._registers = self._alone = False
        self._body = self._unsent = _NOTHING
        self._heads = self._size = self._received = self._answer_size = 0
        self._json_size: int | None = None
        self._keep_alive = True
        self._stall = StallDetector()
        self._advancing = False
        self._paused = False
        self._backed_up = False

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # a socket's transport is one
        secured = transport.get_extra_info("sslcontext") is not None
        # So that we learn when an answer has left its slot. Of TLS the transport pauses at its limit, else above it.
        self._transport.set_write_buffer_limits(high=1 if secured else 0)
        self._piece = _TLS_PIECE if secured else sys.maxsize
        self._server.connections.handshake_done(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        if self._phase is _Phase.BODY or self._phase is _Phase.ASIDE:
            return self._body[self._received :]
        return self._ahead.room()

    def buffer_updated(self, nbytes: int) -> None:
        if self._phase is _Phase.BODY:
            self._received += nbytes
            if self._received == self._size:
                self._run()
            return
        if self._phase is _Phase.ASIDE:
            self._received += nbytes
            if self._received == self._size:
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

    def eof_received(self) -> None:
        """Let asyncio close the connection: nobody is left to answer."""

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.alive = False
        self._server.connections.remove(self)
        self._shared.close()
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

    # what the server calls

    @property
    def idle(self) -> bool:
        """Whether the teacher owes it nothing: it asks nothing, or has yet to send what it asks."""
        return self._phase in (_Phase.HEAD, _Phase.ARRIVING, _Phase.ASIDE)

    @property
    def stalled_for(self) -> int:
        """How many checks in a row have found that it has stalled, 0 if fewer than MAX_STALLED_CHECKS_CONTESTED."""
        checks = self._stall.current(self._progress())
        return checks if checks >= MAX_STALLED_CHECKS_CONTESTED else 0

    def end(self) -> None:
        """Disconnect, when what has been written is sent; and say so to one whose request has no answer yet."""
        if self._phase in _UNANSWERED:
            self._server.metrics.count_answer(LEAVING.status)
            self._transport.write(render(LEAVING, keep_alive=False))
        self._transport.close()

    def abort(self) -> None:
        """Disconnect at once."""
        self._transport.abort()

    @property
    def slow(self) -> bool:
        """Whether less than MIN_BYTES_CONTESTED have moved between the last two checks, in which it had to."""
        return self._stall.moved is not None and self._stall.moved < MIN_BYTES_CONTESTED

    @property
    def bytes_to_come(self) -> int:
        """Bytes of a body, which it has begun to send, that have yet to come."""
        return self._size - self._received

    def check_progress(self) -> bool:
        """Look at the client, and disconnect it if it has not done its part for too long.

        Return whether its body comes too slowly for a slot that others wait for.
        """
        awaited = self._slot >= 0 and self._server.slots.contested
        checks = self._stall.check(self._progress(), MIN_BYTES_CONTESTED if awaited else 1)
        if awaited and self._phase is _Phase.BODY:
            return checks > 0
        if checks >= (MAX_STALLED_CHECKS_CONTESTED if awaited else MAX_STALLED_CHECKS):
            self._transport.abort()
        return False

    def move_aside(self) -> None:
        """Receive the body beside its slot from now on; without room disconnect the client, if it stays too slow.

        The slot is its own until `leave_slot`.
        """
        if not self._move_aside(self._body[: self._received]) and self._stall.checks >= MAX_STALLED_CHECKS_CONTESTED:
            self._transport.abort()

    def leave_slot(self) -> None:
        """Give back the slot if the body is received into it no more."""
        if self._phase is not _Phase.BODY:
            slot, self._slot = self._slot, -1
            self._server.slots.give_back(slot, self._size, 0)

    def move_aside_if_waiting(self) -> None:
        """Receive a body that waits for a slot in the socket beside the slots, if there is room."""
        if self._phase is _Phase.WAITING and not self._body and len(self._ahead) < self._size and self._move_aside():
            self._received = self._ahead.take_into(self._body)
            self._pause_while_full()

    def _move_aside(self, received: memoryview = _NOTHING) -> bool:
        """Receive the body, with what of it lies in its slot, into memory of its own; return whether there is room."""
        memory = self._server.side_buffers.take(self, self._size)
        if memory is None:
            return False
        memory[: len(received)] = received
        self._body = memory
        self._phase = _Phase.ASIDE
        self._server.slots.expect(self)
        return True

    def refuse_body(self) -> None:
        """Answer that there is no room for a body that comes slowly."""
        self._forget_body()
        self._close_with(refusal(503, "the body comes too slowly: others wait, and there is no memory to keep it in"))

    def _forget_body(self) -> None:
        """Neither receive the body any more nor wait for a slot for it."""
        self._body = _NOTHING
        self._server.side_buffers.give_back(self)
        self._server.slots.leave(self)

    def _progress(self) -> ClientProgress | None:
        """Return how far the client is with its part; None when it has none, for it may be idle if known."""
        is_idle = self._phase is _Phase.HEAD and not self._ahead
        if self._phase in (_Phase.WAITING, _Phase.COPYING, _Phase.RUNNING) or (is_idle and self.known):
            return None
        sends = self._phase is _Phase.SENDING
        moved = -len(self._unsent) - unsent_bytes(self._transport) if sends else self._received + len(self._ahead)
        phase = _Phase.BODY if self._phase is _Phase.ASIDE else self._phase
        return ClientProgress((phase, self._heads), moved)

    def begin_body(self, slot: int) -> None:
        """Receive the body into `slot`, with what of it has come; or copy it there from a side buffer."""
        self._slot = slot
        area = self._server.arena.request(slot)[: self._size]
        if self._body:
            self._server.side_buffers.give_back(self)  # first, so that it is not refused for another's sake
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
        """Copy a piece of the body, which was set aside, and the rest when others have had their turn."""
        if not self.alive:  # then the slot is another's
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
        """Deal with the heads that have been read."""
        if self._advancing:
            return
        self._advancing = True
        while self._phase is _Phase.HEAD and self._ahead and not self._transport.is_closing():
            if not self._ahead.may_be_http:
                self._close_at_once(refusal(400, "this is no HTTP; does the client speak TLS, and this teacher not?"))
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
        """Answer, or take the body. Raises ProtocolError."""
        size = head.size(CONTENT_LENGTH)
        json_size = head.size(JSON_SIZE)
        self._keep_alive = head.keep_alive
        if self._server.routes.admits(head):
            self.known = True
            self._server.connections.mark_used(self)
        answer = self._server.routes.route(head, draining=self._server.draining)
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
        """Wait for a slot once the body is there, or more of it than there is room for: who sends slowly holds none."""
        if self._ahead.full or len(self._ahead) >= self._size:
            self._take_slot()

    def _take_slot(self) -> None:
        self._phase = _Phase.WAITING
        self._server.slots.take(self)

    def _run(self) -> None:
        self._phase = _Phase.RUNNING
        if self._registers:
            answer = self._shared.register(self._body, self._server.arena.answer(self._slot))
            self._server.metrics.count_refusal(answer.status)
            self._send(answer)
            return
        if self._shared.region is not None:
            self._server.arena.regions[self._slot] = self._shared.region
        self._server.arena.alone[self._slot] = self._alone
        self._server.runner.submit(self._slot, self._size, self._json_size, self._send)

    def _send(self, answer: EncodedAnswer) -> None:
        """Send the answer that lies in the slot, and keep the slot until a large one has left."""
        self._answer_size = answer.size
        if not self.alive:
            self._return_slot()
            return
        self._keep_alive = self._keep_alive and not self._server.draining
        head = answer_head(answer, keep_alive=self._keep_alive)
        body = self._server.arena.answer(self._slot)[: answer.size]
        self._phase = _Phase.SENDING
        if answer.size <= _SMALL_ANSWER:
            self._transport.write(head + body)  # which is a copy, so the slot is another's from now on
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
        # Not now: asyncio may be in the middle of a write, after which Python 3.11 would end the connection once more.
        asyncio.get_running_loop().call_soon(self._transport.close)

    def _close_with(self, answer: Reply) -> None:
        """Answer and disconnect; drop what the client is still sending, so that it gets to read the answer."""
        self._keep_alive = False
        self._phase = _Phase.LINGERING
        self._ahead.clear()
        self._server.metrics.count_refusal(answer.status)
        self._transport.write(render(answer, keep_alive=False))
        if self._transport.can_write_eof():  # not in TLS, which ends both ways at once
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)

    def _close_at_once(self, answer: Reply) -> None:
        """Answer and disconnect, whatever is still to come."""
        self._phase = _Phase.LINGERING
        self._ahead.clear()
        self._server.metrics.count_refusal(answer.status)
        self._transport.write(render(answer, keep_alive=False))
        self._transport.close()

    def _return_slot(self) -> None:
        if self._slot >= 0:
            slot, self._slot = self._slot, -1
            self._body = self._unsent = _NOTHING
            self._server.slots.give_back(slot, self._size, self._answer_size)

    def _pause_while_full(self) -> None:
        """Read no further while what is read ahead has not been used."""
        full = self._ahead.full and self._phase is not _Phase.LINGERING
        if full and not self._paused:
            self._transport.pause_reading()
        elif self._paused and not full:
            self._transport.resume_reading()
        self._paused = full


# The read buffer

_READ_BUFFER_SIZE = 64 * 1024
_FIRST_BYTES = frozenset(f"{ascii_uppercase}\r\n")


class ReadBuffer:
    """A buffer that heads are cut out of. Its length is the number of bytes that wait in it."""

    def __init__(self) -> None:
        self._bytes = bytearray(_READ_BUFFER_SIZE)
        self._view = memoryview(self._bytes)
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def full(self) -> bool:
        return len(self) == _READ_BUFFER_SIZE

    @property
    def may_be_http(self) -> bool:
        """Whether a request may begin with the first byte: a method's letter, or the line end that some put before."""
        return not self or chr(self._bytes[self._start]) in _FIRST_BYTES

    def room(self) -> memoryview:
        """Return where the next bytes go; tell `grow` how many did."""
        rest = len(self)
        if self._start:
            self._bytes[:rest] = self._bytes[self._start : self._end]
            self._start, self._end = 0, rest
        return self._view[rest:]

    def grow(self, size: int) -> None:
        self._end += size

    def clear(self) -> None:
        self._start = self._end = 0

    def take_head(self) -> bytes | None:
        """Return the next head, its empty line included, None while it is not all there."""
        end = self._bytes.find(END_OF_HEAD, self._start, min(self._end, self._start + HEAD_LIMIT))
        if end < 0:
            return None
        start, self._start = self._start, end + len(END_OF_HEAD)
        return bytes(self._view[start : self._start])

    def take_into(self, area: memoryview) -> int:
        """Move as much as there is and fits into `area`; return how many bytes."""
        size = min(len(self), len(area))
        area[:size] = self._view[self._start : self._start + size]
        self._start += size
        return size
