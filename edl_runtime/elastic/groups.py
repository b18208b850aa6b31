"""Who adds up gradients together: the trainers of one generation, and how they talk.

A process is in one group after the other, each of its own size. Paddle's global group is not touched, so a script sees
none of it. Tensors are on the CPU for gloo and on the process's one GPU for NCCL.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from edl_runtime.elastic.meeting import Meeting, Met
from edl_runtime.elastic.star import Star
from edl_runtime.errors import GroupLostError
from edl_runtime.protocol.address import endpoint_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from numpy.typing import NDArray

    from edl_runtime.elastic.messages import Join

STORE_LIMIT_S = 10
"""How long a store that has been told of may take to answer."""

NCCL_LIMIT_S = 30
PORT_TRIES = 3

PIECE = 1 << 20
"""Bytes of state that are given at a time: each counts as a move, and rank 0 passes it on before the next."""

Backend = Literal["gloo", "nccl"]


def choose_backend(gpus: int) -> Backend:
    """Return what trainers talk by: NCCL where each has a GPU of its own, else gloo."""
    return "nccl" if gpus else "gloo"


class Group(Protocol):
    """The ranks of one generation. Whatever waits for another rank raises GroupLostError when one is lost."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def sum(self, values: Any) -> None:
        """Replace the tensor's values by their sums over all ranks: the same bits everywhere.

        All ranks have to come to it within seconds, as after a `count`.
        """
        ...

    def count(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums over all ranks. Waits for as long as any of them takes to come to it."""
        ...

    def give(self, values: NDArray[np.uint8], source: int, takers: Collection[int]) -> None:
        """Replace the bytes on these ranks by those of the source. For these and the source; rank 0 is one of them."""
        ...

    def abort(self) -> None:
        """Let go of whatever waits, in any thread. The group is of no use after it."""
        ...

    def close(self) -> None:
        """Let go of the sockets. The others notice, if they use the group still."""
        ...


class Alone:
    """A group of one."""

    rank = 0
    world_size = 1

    def sum(self, values: Any) -> None:
        pass

    def count(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        return counts

    def give(self, values: NDArray[np.uint8], source: int, takers: Collection[int]) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class PaddleGroup:
    """A group that talks by Paddle's gloo, or by NCCL.

    NCCL has not been run on GPUs: treat it as written only. `abort` can't interrupt it, so its generations are never
    live: the agent ends such a trainer.
    """

    def __init__(self, join: Join, backend: Backend, *, moved: Callable[[], None] = lambda: None) -> None:
        """Make a usable object of it by `meet`. `moved` is called after each piece that is given or taken."""
        self.rank = join.rank
        self.world_size = join.world_size
        self._join = join
        self._backend = backend
        self._moved = moved
        self._meeting = Meeting(join)
        self._star = Star({})
        self._store: Any = None
        self._store_port = 0
        self._talk: Any = None
        self._older: set[int] | None = None  # epolls, before its own come
        self._own: set[int] | None = None  # epolls, once all are there
        self._aborted = False
        self._closed = False
        self._closing = threading.Lock()

    def meet(self, name: str, step: int | None) -> Met:
        """Return what all ranks have come with, when all can talk. Raises GroupLostError."""
        met, self._star = self._meeting.hold(name, step, self._open_store)
        with self._lost_if_failing():
            self._connect(met)
        return met

    def sum(self, values: Any) -> None:
        with self._lost_if_failing():
            self._talk.allreduce(values).wait()

    def count(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        with self._lost_if_failing():
            return self._star.sum(counts)

    def give(self, values: NDArray[np.uint8], source: int, takers: Collection[int]) -> None:
        with self._lost_if_failing():
            for begin in range(0, len(values), PIECE):
                self._give(values[begin : begin + PIECE], source, takers)
                self._moved()

    def abort(self) -> None:
        with self._closing:
            if not self._closed:  # else its descriptors may be those of the next group
                self._let_go()

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._let_go()
            self._closed = True
        self._meeting.close()
        self._talk = None

    def _let_go(self) -> None:
        self._aborted = True
        self._meeting.abort()
        if self._store_port:
            _close_listener(self._store_port)
        for fd in self._sockets():
            _shut(fd)

    def _give(self, piece: NDArray[np.uint8], source: int, takers: Collection[int]) -> None:
        if self.rank != source:
            self._star.receive(piece, 0 if self.rank else source)
        elif self.rank:
            self._star.send(piece, 0)  # which passes it on
        if self.rank == 0:
            for taker in set(takers) - {0}:
                self._star.send(piece, taker)

    @contextlib.contextmanager
    def _lost_if_failing(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, OSError, EOFError) as error:
            raise GroupLostError(self._join.generation, in_words(error)) from error

    def _open_store(self) -> int:
        """Rank 0's: the store's port is new each time, for those of older generations stay open in this process."""
        from paddle.base import core

        self._older = _epolls()
        host, _ = endpoint_of(self._join.store, "store")
        for attempt in range(PORT_TRIES):
            port = _free_port(host)
            try:
                # for no ranks at all: its own way to wait for them takes 90 ms
                self._store = core.TCPStore(host, port, True, 0, STORE_LIMIT_S)
            except (RuntimeError, ValueError, OSError):
                if attempt + 1 == PORT_TRIES:
                    raise
            else:
                self._store_port = port
                return port
        raise AssertionError("unreachable")

    def _connect(self, met: Met) -> None:
        from paddle.base import core

        host, _ = endpoint_of(self._join.store, "store")
        if self._store is None:
            self._older = _epolls()
            self._store_port = met.store_port
            self._store = core.TCPStore(host, met.store_port, False, 0, STORE_LIMIT_S)
        for fd in self._sockets():
            _without_delay(fd)
        os.environ["PADDLE_TRAINER_ID"] = str(self.rank)  # read by Paddle when it makes a group
        number, size = self._join.generation, self.world_size
        if self._backend == "gloo":
            self._talk = core.ProcessGroupGloo.create(self._store, self.rank, size, number)
            _close_listener(self._store_port)  # all have come, and it would listen to anybody at any address
        else:
            nccl: Any = core  # a build for the CPU has none
            self._talk = nccl.ProcessGroupNCCL.create(self._store, self.rank, size, number, NCCL_LIMIT_S * 1000, 0, 0)
        self._own = self._new_epolls()
        if self._aborted:  # while the sockets were not there yet
            raise GroupLostError(number, "a rank was lost")

    def _sockets(self) -> list[int]:
        """Return the descriptors of this group's sockets.

        They are of no use to Python, and Paddle doesn't tell them. Those of gloo and of the store's server are watched
        by epolls that have come while it was made; the store's client has the store's port at its other end.
        """
        epolls = self._new_epolls() if self._own is None else self._own
        watched = {fd for epoll in epolls for fd in _watched(epoll)}
        return [fd for fd in _descriptors("socket:") if fd in watched or _peer_port(fd) == self._store_port]

    def _new_epolls(self) -> set[int]:
        return set() if self._older is None else _epolls() - self._older


def _descriptors(kind: str) -> list[int]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith(kind):
                found.append(int(entry.name))
    return found


def _epolls() -> set[int]:
    return set(_descriptors("anon_inode:[eventpoll]"))


def _watched(epoll: int) -> list[int]:
    try:
        lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]


@contextlib.contextmanager
def _borrowed(fd: int) -> Any:
    """Yield a socket object over a copy of the descriptor."""
    with socket.socket(fileno=os.dup(fd)) as end:
        yield end


def _peer_port(fd: int) -> int | None:
    with contextlib.suppress(OSError), _borrowed(fd) as end:
        if end.family in {socket.AF_INET, socket.AF_INET6}:
            return int(end.getpeername()[1])
    return None


def _close_listener(port: int) -> None:
    """Have nobody listen at this port any more, though its descriptor is Paddle's: put one in its place that is silent.

    Shut down, it would be told ready for ever to whoever waits for connections.
    """
    for fd in _descriptors("socket:"):
        with contextlib.suppress(OSError), _borrowed(fd) as end:
            listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and end.family in {socket.AF_INET, socket.AF_INET6} and end.getsockname()[1] == port:
                silent = os.eventfd(0)
                os.dup2(silent, fd, inheritable=False)
                os.close(silent)


def _shut(fd: int) -> None:
    with contextlib.suppress(OSError), _borrowed(fd) as end:
        end.shutdown(socket.SHUT_RDWR)


def _without_delay(fd: int) -> None:
    """Have small messages sent at once. The store's are two packets each, which else cost 40 ms of waiting."""
    with contextlib.suppress(OSError), _borrowed(fd) as end:
        if end.type == socket.SOCK_STREAM:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _free_port(host: str) -> int:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as listener:
        return int(listener.getsockname()[1])


def in_words(error: BaseException) -> str:
    """Return why a group was lost, for people: Paddle's own errors name its files and addresses."""
    said = str(error)
    if re.search(r"timed? ?out", said, re.IGNORECASE):
        return "another rank was waited for in vain"
    if re.search(r"reset by peer|closed by peer|broken pipe|socket closed|bad file|not connected", said, re.IGNORECASE):
        return "the connection to another rank has ended"
    lines = re.sub(r"\[\S*/\S+\.(?:cc|h|cpp):\d+\] ?", "", said).strip().splitlines()
    return lines[0] if lines else type(error).__name__
