"""Large bodies that come slowly, at a teacher's HTTP server over real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest
from support.teachers.process import PATIENCE_S, wait_until
from support.teachers.serving import HeldRunner, Served, echo_request, serving

from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.tls import Trust
from edl_runtime.teacher.http import server
from edl_runtime.teacher.http.admission import MAX_STALLED_CHECKS, MAX_STALLED_CHECKS_CONTESTED

SIZE = 1 << 20
BEGUN = 100_000
"""Bytes that a client sends at first: more than a teacher reads ahead."""

SLOTS = 16


class Slow:
    """A client that sends the first part of a large body at once, and more when the test asks for it."""

    def __init__(self, connected: socket.socket, size: int = SIZE, value: int = 0) -> None:
        self.connected = connected
        wanted = echo_request(size, value)
        self._answer = bytes([value]) * size
        connected.sendall(wanted[:BEGUN])
        self._rest = memoryview(wanted)[BEGUN:]

    def send(self, size: int) -> None:
        self.connected.sendall(self._rest[:size])
        self._rest = self._rest[size:]

    def finish(self) -> None:
        """Send what is left, and find the right answer."""
        self.send(len(self._rest))
        answer = self.read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(self._answer)

    def read(self) -> bytes:
        """Return what comes until the teacher disconnects."""
        answer = b""
        with suppress(ConnectionResetError):
            while part := self.connected.recv(1 << 20):
                answer += part
        return answer


class Teacher:
    """A teacher that serves, and its slow clients."""

    def __init__(self, served: Served, stack: ExitStack, trust: Trust | None) -> None:
        self.served = served
        self.trust = trust
        self._stack = stack
        self.clients: list[Slow] = []

    def slow(self, size: int = SIZE) -> Slow:
        """Connect one more client."""
        connected = self._stack.enter_context(self.served.connect())
        if self.trust:
            connected = self._stack.enter_context(
                self.trust.context.wrap_socket(connected, server_hostname="127.0.0.1")
            )
        self.clients.append(Slow(connected, size, len(self.clients)))
        wait_until(lambda: self.in_flight == len(self.clients))
        return self.clients[-1]

    @property
    def in_flight(self) -> int:
        return self.served.on_loop(lambda: self.served.front.slots.in_flight)

    @property
    def free(self) -> int:
        return self.served.on_loop(lambda: len(self.served.front.slots._free))

    @property
    def waiting(self) -> int:
        return self.served.on_loop(lambda: len(self.served.front.slots._waiting))

    @property
    def aside(self) -> int:
        return self.served.on_loop(lambda: self.served.front.side_memory.size)

    def check_stalled(self, times: int = 1) -> None:
        """Check all clients, each of which sends a byte before."""
        for _ in range(times):
            for client in self.clients:
                client.send(1)
            self.served.check_stalled()


@contextmanager
def a_teacher(
    slots: int = SLOTS, *, max_side_bytes: int = 256 << 20, tls: tuple[ssl.SSLContext, Trust] | None = None
) -> Iterator[Teacher]:
    context, trust = tls or (None, None)
    with ExitStack() as stack:
        served = stack.enter_context(
            serving("echo", slots=slots, limit=2 * SIZE, max_side_bytes=max_side_bytes, tls=context),
        )
        yield Teacher(served, stack, trust)


@pytest.mark.parametrize(("clients", "secured"), [(SLOTS, False), (40, False), (SLOTS, True)])
def test_large_bodies_that_come_slowly_hold_no_slot(
    tls: tuple[ssl.SSLContext, Trust], *, clients: int, secured: bool
) -> None:
    """However many there are, another client is served at the next check, and slow ones are answered later."""
    with a_teacher(tls=tls if secured else None) as teacher:
        for _ in range(clients):
            teacher.slow()
        wait_until(lambda: teacher.free == 0 and teacher.waiting == clients - SLOTS)
        teacher.check_stalled()
        fast = teacher.slow()
        wait_until(lambda: teacher.waiting == clients - SLOTS + 1)
        teacher.clients.remove(fast)
        teacher.check_stalled()
        fast.finish()
        assert teacher.aside == pytest.approx(clients * SIZE, rel=0.001)
        assert teacher.free == SLOTS
        teacher.check_stalled(2 * MAX_STALLED_CHECKS)
        for client in teacher.clients:
            client.finish()
        wait_until(lambda: teacher.in_flight == 0)
        assert teacher.aside == 0


def test_a_body_that_is_set_aside_waits_for_a_slot_when_it_is_there() -> None:
    """It is received though all slots are taken, and its turn comes as that of any other."""
    with ExitStack() as stack:
        served = stack.enter_context(serving("echo", HeldRunner, slots=1, limit=2 * SIZE))
        teacher = Teacher(served, stack, None)
        slow = teacher.slow()
        wait_until(lambda: teacher.free == 0)
        teacher.check_stalled()
        others = [stack.enter_context(served.connect()) for _ in range(2)]
        for other in others:
            other.sendall(echo_request(1))
        wait_until(lambda: teacher.waiting == 2)
        teacher.check_stalled()
        wait_until(lambda: len(served.held) == 1)
        slow.send(SIZE)
        wait_until(lambda: teacher.waiting == 2)
        for other in others:
            wait_until(lambda: len(served.held) == 1)
            served.on_loop(served.held.pop())
            assert other.recv(65536).startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: len(served.held) == 1)
        served.on_loop(served.held.pop())
        slow.finish()


def contested(teacher: Teacher, waits: int) -> None:
    """Let a request wait for a slot, so that the next check moves slow bodies to side buffers."""
    teacher.check_stalled()
    for _ in range(waits):
        other = teacher.served.connect()
        teacher._stack.enter_context(other)
        other.sendall(echo_request(1))
    wait_until(lambda: teacher.waiting == waits)
    teacher.check_stalled()


def test_slow_bodies_take_no_more_memory_than_there_is() -> None:
    """The client with the most bytes to come is refused with a reason; the others continue."""
    with a_teacher(slots=3, max_side_bytes=3 * SIZE) as teacher:
        large, small, other = (teacher.slow(size) for size in (3 * SIZE // 2, SIZE, SIZE))
        wait_until(lambda: teacher.free == 0)
        contested(teacher, 1)
        teacher.clients.remove(large)
        refused = large.read()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"the body arrives too slowly" in refused
        assert teacher.aside < 3 * SIZE
        small.finish()
        other.finish()
        wait_until(lambda: teacher.in_flight == teacher.aside == 0)
        assert teacher.free == 3


def test_a_body_that_is_larger_than_the_memory_loses_its_slot() -> None:
    """It is disconnected after a few checks, and the waiting client is served."""
    with a_teacher(slots=1, max_side_bytes=SIZE // 2) as teacher:
        slow = teacher.slow()
        wait_until(lambda: teacher.free == 0)
        contested(teacher, 1)
        assert teacher.aside == 0
        teacher.check_stalled(MAX_STALLED_CHECKS_CONTESTED - 1)
        assert slow.read() == b""
        wait_until(lambda: teacher.free == 1)


def test_a_fast_client_is_not_refused_when_buffers_are_full() -> None:
    """It waits without a buffer, and gets a slot that a slow one has lost."""
    with a_teacher(slots=1, max_side_bytes=SIZE + 1000) as teacher:
        slow = teacher.slow()
        wait_until(lambda: teacher.free == 0)
        teacher.check_stalled()
        fast = [teacher.slow() for _ in range(3)]
        wait_until(lambda: teacher.waiting == 3)
        teacher.clients[:] = [slow]
        teacher.check_stalled()
        for client in fast:
            client.finish()
        slow.finish()


def test_a_client_whose_body_was_set_aside_leaves_nothing_behind() -> None:
    """Neither while it sends, nor while all of the body waits for a slot, nor when it is silent for too long."""
    with ExitStack() as stack:
        served = stack.enter_context(serving("echo", HeldRunner, slots=3, limit=2 * SIZE))
        teacher = Teacher(served, stack, None)
        leaves, waits, silent = (teacher.slow() for _ in range(3))
        wait_until(lambda: teacher.free == 0)
        contested(teacher, 4)
        assert teacher.aside > 3 * SIZE
        waits.send(SIZE)
        wait_until(lambda: teacher.waiting == 2)
        for client in (leaves, waits):
            client.connected.close()
        wait_until(lambda: teacher.waiting == 1 and teacher.aside < 2 * SIZE)
        served.check_stalled(MAX_STALLED_CHECKS + 1)
        assert silent.read() == b""
        wait_until(lambda: teacher.aside == 0)
        for count in (3, 1):
            wait_until(lambda count=count: len(served.held) == count)
            for _ in range(count):
                served.on_loop(served.held.pop())
        wait_until(lambda: teacher.in_flight == 0)
        assert teacher.free == 3


def test_a_large_body_is_copied_while_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece at a time, the right one; and a client that disconnects meanwhile leaves nothing behind."""
    monkeypatch.setattr(server, "COPY_PIECE", 10_000)
    with ExitStack() as stack:
        served = stack.enter_context(serving("echo", HeldRunner, slots=2, limit=2 * SIZE))
        teacher = Teacher(served, stack, None)
        stays, leaves = teacher.slow(), teacher.slow()
        wait_until(lambda: teacher.free == 0)
        contested(teacher, 1)
        wait_until(lambda: len(served.held) == 1)
        served.on_loop(served.held.pop())
        stays.send(SIZE)
        wait_until(lambda: len(served.held) == 1)
        served.on_loop(served.held.pop())
        stays.finish()
        monkeypatch.setattr(server, "COPY_PIECE", 0)  # it never comes to its end
        leaves.send(SIZE)
        wait_until(lambda: teacher.free == 1)
        assert not served.held
        leaves.connected.close()
        wait_until(lambda: teacher.in_flight == 0)
        assert (teacher.free, teacher.aside, served.held) == (2, 0, [])


def test_a_body_that_comes_fast_is_received_into_its_slot() -> None:
    """However many wait: what moves at the rate that is asked for is copied nowhere."""
    with a_teacher(slots=1) as teacher:
        fast = teacher.slow()
        wait_until(lambda: teacher.free == 0)
        teacher.check_stalled()
        waits = teacher.slow()
        (connection,) = (one for one in teacher.served.front.connections if one._slot >= 0)
        received = connection._received
        fast.send(300_000)
        wait_until(lambda: connection._received >= received + 300_000)
        teacher.served.check_stalled()
        assert teacher.aside == 0
        assert teacher.free == 0
        fast.finish()
        waits.finish()


def test_the_answer_of_the_reference_client_is_right_beside_slow_ones() -> None:
    """Its large tensors come as they were sent."""
    x = np.arange(SIZE, dtype=np.uint8).reshape(1, -1)
    with a_teacher(slots=1) as teacher, TeacherConnection(teacher.served.address) as client:
        teacher.slow()
        wait_until(lambda: teacher.free == 0)
        contested(teacher, 1)
        assert np.array_equal(client.infer({"x": x}, ["x"])["x"], x)


def test_a_draining_teacher_answers_slow_clients() -> None:
    """Complete requests are answered; at the limit the others get 503, in whatever phase they are."""
    with ExitStack() as stack:
        served = stack.enter_context(serving("echo", HeldRunner, slots=2, limit=2 * SIZE))
        teacher = Teacher(served, stack, None)
        finishes, trickles, waits, in_slot = (teacher.slow() for _ in range(4))
        wait_until(lambda: teacher.waiting == 2)
        teacher.check_stalled(2)
        assert teacher.aside > 3 * SIZE
        late = teacher.slow()  # into the slot that they have left
        wait_until(lambda: teacher.free == 1)
        finishes.send(SIZE)
        wait_until(lambda: len(served.held) == 1)
        waits.send(SIZE)
        wait_until(lambda: teacher.waiting == 1)
        served.front.draining = True
        served.on_loop(served.held.pop())
        finishes.finish()
        for client in (trickles, in_slot, late):
            client.send(1)
        wait_until(lambda: len(served.held) == 1)  # what waited runs, and so it has no answer at the limit
        drained = asyncio.run_coroutine_threadsafe(served.front.drain(0.1), served.loop)
        assert not drained.result(PATIENCE_S)
        for client in (trickles, waits, in_slot, late):
            assert client.read().startswith(b"HTTP/1.1 503 ")
        wait_until(lambda: not served.front.connections)
        served.on_loop(served.held.pop())
        assert (teacher.in_flight, teacher.aside, teacher.free) == (0, 0, 2)
