"""Peers and the network between them in memory: a case delivers each byte, and nothing waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
from support.fuzzing.messages import REGISTRATION, SHARED, SIGNATURE
from support.teachers.runners import answer_request

from edl_runtime.protocol.shared_memory import ClientRegion
from edl_runtime.protocol.tensors import Array
from edl_runtime.teacher.http.server import ClientConnection, HttpServer
from edl_runtime.teacher.predictor.pool import Done
from edl_runtime.teacher.shm.arena import Arena


class Echo:
    """A model that answers its inputs."""

    signature = SIGNATURE

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        return {name: inputs[name] for name in outputs}


class SlowRunner:
    """Answers at once, or, when `slow`, once `go` is called."""

    def __init__(self, arena: Arena) -> None:
        self.slow = False
        self._arena = arena
        self._model = Echo()
        self._waiting: list[Callable[[], None]] = []

    def submit(self, slot: int, size: int, json_size: int | None, done: Done) -> None:
        request, into = self._arena.request(slot)[:size], self._arena.answer(slot)
        region = self._arena.regions.get(slot)
        shared = None if region is None else region.view  # as a predictor has it from now on
        self._waiting.append(lambda: done(answer_request(self._model, request, json_size, into, shared)))
        if not self.slow:
            self.go()

    def drop(self, slot: int) -> None:
        """Answer it all the same."""

    def go(self) -> bool:
        """Answer what waits; return whether anything did."""
        waiting, self._waiting = self._waiting, []
        for run in waiting:
            run()
        return bool(waiting)


class Wire(asyncio.Transport):
    """A client's socket as a teacher's connection sees it. A `slow` one takes written bytes only by `take`."""

    def __init__(self, connection: ClientConnection, *, slow: bool) -> None:
        super().__init__()
        self.paused = self.closed = False
        self.sent = bytearray()
        self._connection = connection
        self._slow = slow
        self._unsent = 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Note nothing: an answer counts as sent when `take` has been called."""

    def get_write_buffer_size(self) -> int:
        return self._unsent

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data
        if self._slow:
            self._unsent += len(data)
            self._connection.pause_writing()

    def take(self) -> bool:
        """Take what is written; return whether there was any."""
        unsent, self._unsent = self._unsent, 0
        if unsent:
            self._connection.resume_writing()
        return bool(unsent)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Note nothing: what is read ends with what was written."""

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class _Loop(asyncio.SelectorEventLoop):
    """Ignores timers: every case ends at once."""

    def call_later(self, *_args: object, **_more: object) -> asyncio.TimerHandle:
        return asyncio.TimerHandle(0.0, int, (), self)


class MemoryTeacher:
    """A teacher's HTTP server without a network."""

    def __init__(self) -> None:
        self._loop = _Loop()
        self._arena = Arena.create(1 << 16, slots=2)
        self._runner = SlowRunner(self._arena)
        self._front = HttpServer(SIGNATURE, self._runner, self._arena)
        self._shared = ExitStack()
        self._registration = self._shared.enter_context(ClientRegion(SHARED).offered()).ljust(len(REGISTRATION))

    def close(self) -> None:
        self._shared.close()
        self._loop.close()
        self._arena.close()

    def exchange(self, sent: bytes, pieces: int = 1, *, slow: bool = False, leaves: bool = False) -> bytes:
        """Return a teacher's answers to these bytes, sent in `pieces` pieces.

        A client that `leaves` disconnects before it has taken all answers.
        """
        sent = sent.replace(REGISTRATION, self._registration)
        return self._loop.run_until_complete(self._exchange(sent, pieces, slow=slow, leaves=leaves))

    async def _exchange(self, sent: bytes, pieces: int, *, slow: bool, leaves: bool) -> bytes:
        connection = self._front.connect()
        wire = Wire(connection, slow=slow)
        self._runner.slow = slow
        connection.connection_made(wire)
        try:
            for part in _cut(sent, pieces):
                self._deliver(connection, wire, part)
            while not leaves and (self._runner.go() or wire.take()):
                pass
        finally:
            connection.eof_received()
            connection.connection_lost(None)
            self._runner.go()
        assert not self._front.regions._open, "a disconnected client keeps shared memory"
        assert not self._front.connections
        assert (self._front.slots.in_flight, len(self._front.slots._free)) == (0, 2), "it keeps a slot"
        return bytes(wire.sent)

    def _deliver(self, connection: ClientConnection, wire: Wire, part: bytes) -> None:
        while part and not wire.closed:
            if wire.paused:
                assert self._runner.go() or wire.take(), "reading is paused, and nothing is left that could resume it"
            if not wire.paused:
                room = connection.get_buffer(-1)
                taken = min(len(room), len(part))
                assert taken, "there is no room for what comes, and reading is not paused"
                room[:taken] = part[:taken]
                connection.buffer_updated(taken)
                part = part[taken:]
        if not self._runner.go():
            wire.take()


class MemorySocket:
    """A teacher's socket as a student's stream sees it: after each request comes the next of `answers`, in pieces.

    After the last it is silent if `slow`, else it closes.
    """

    def __init__(self, answers: Sequence[bytes], pieces: int, *, slow: bool) -> None:
        self._answers = iter(answers)
        self._pieces = pieces
        self._slow = slow
        self._ready: list[bytes] = []  # the next last

    def settimeout(self, *_: object) -> None:
        """Do nothing."""

    setsockopt = shutdown = close = settimeout

    def sendmsg(self, buffers: Sequence[bytes | Array]) -> int:
        coming = [*reversed(self._ready), *_cut(next(self._answers, b""), self._pieces)]
        self._ready = coming[::-1]
        return sum(one.nbytes if isinstance(one, np.ndarray) else len(one) for one in buffers)

    def recv_into(self, into: memoryview, _size: int, _flags: int) -> int:
        assert len(into), "an empty buffer would wait for ever"
        if not self._ready and self._slow:
            raise BlockingIOError
        part = self._ready.pop() if self._ready else b""
        taken = min(len(part), len(into))
        into[:taken] = part[:taken]
        if part[taken:]:
            self._ready.append(part[taken:])
        return taken


def _cut(sent: bytes, pieces: int) -> Iterator[bytes]:
    size = max(1, -(-len(sent) // pieces))
    return (sent[start : start + size] for start in range(0, len(sent), size))
