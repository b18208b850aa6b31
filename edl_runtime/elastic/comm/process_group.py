"""The process group of one generation, over Paddle's gloo or NCCL, and the session that moves a worker between groups.

A process is in one group after the other, each of its own size. Paddle's global group is not touched, so a script sees
none of it. Tensors are on the CPU for gloo and on the process's one GPU for NCCL.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from edl_runtime.elastic.comm.agent_client import AgentClient, Directive
from edl_runtime.elastic.comm.agent_protocol import GenerationLost, JoinGeneration, Leave
from edl_runtime.elastic.comm.bootstrap import Bootstrap, ControlChannel, Welcome
from edl_runtime.elastic.comm.paddle_sockets import (
    close_listener,
    descriptors,
    disable_delay,
    free_port,
    open_epolls,
    peer_port,
    shut_down,
    watched_by,
)
from edl_runtime.elastic.errors import GroupLostError
from edl_runtime.log import get_logger
from edl_runtime.protocol.address import endpoint_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

STORE_LIMIT_S = 10
"""How long a store that has been told of may take to answer."""

NCCL_LIMIT_S = 30
PORT_TRIES = 3

CHUNK_BYTES = 1 << 20
"""Bytes of state that are given at a time: each counts as a move, and rank 0 passes it on before the next."""

CommBackend = Literal["gloo", "nccl"]


def choose_backend(gpus: int) -> CommBackend:
    """Return what trainers talk by: NCCL where each has a GPU of its own, else gloo."""
    return "nccl" if gpus else "gloo"


class ProcessGroup(Protocol):
    """The ranks of one generation. Whatever waits for another rank raises GroupLostError when one is lost."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, values: Any) -> None:
        """Replace the tensor's values by their sums over all ranks: the same bits everywhere.

        All ranks have to come to it within seconds, as after a `all_reduce_counts`.
        """
        ...

    def all_reduce_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums over all ranks. Waits for as long as any of them takes to come to it."""
        ...

    def broadcast(self, values: NDArray[np.uint8], source: int, receivers: Collection[int]) -> None:
        """Replace the bytes on these ranks by those of the source. For these and the source; rank 0 is one of them."""
        ...

    def abort(self) -> None:
        """Let go of whatever waits, in any thread. The group is of no use after it."""
        ...

    def close(self) -> None:
        """Let go of the sockets. The others notice, if they use the group still."""
        ...


class SingleProcessGroup:
    """A group of one."""

    rank = 0
    world_size = 1

    def all_reduce(self, values: Any) -> None:
        pass

    def all_reduce_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        return counts

    def broadcast(self, values: NDArray[np.uint8], source: int, receivers: Collection[int]) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class PaddleProcessGroup:
    """A group that talks by Paddle's gloo, or by NCCL.

    NCCL has not been run on GPUs: treat it as written only. `abort` can't interrupt it, so its generations are never
    live: the agent ends such a trainer.
    """

    def __init__(
        self, join: JoinGeneration, backend: CommBackend, *, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """Make a usable object of it by `meet`. `on_progress` is called after each piece that is given or taken."""
        self.rank = join.rank
        self.world_size = join.world_size
        self._join = join
        self._backend = backend
        self._on_progress = on_progress
        self._bootstrap = Bootstrap(join)
        self._control = ControlChannel({})
        self._store: Any = None
        self._store_port = 0
        self._paddle_group: Any = None
        self._older: set[int] | None = None  # epolls, before its own come
        self._own: set[int] | None = None  # epolls, once all are there
        self._aborted = False
        self._closed = False
        self._closing = threading.Lock()

    def meet(self, name: str, step: int | None) -> Welcome:
        """Return what all ranks have come with, when all can talk. Raises GroupLostError."""
        welcome, self._control = self._bootstrap.run(name, step, self._open_store)
        with self._group_lost_on_error():
            self._connect(welcome)
        return welcome

    def all_reduce(self, values: Any) -> None:
        with self._group_lost_on_error():
            self._paddle_group.allreduce(values).wait()

    def all_reduce_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        with self._group_lost_on_error():
            return self._control.all_reduce(counts)

    def broadcast(self, values: NDArray[np.uint8], source: int, receivers: Collection[int]) -> None:
        with self._group_lost_on_error():
            for begin in range(0, len(values), CHUNK_BYTES):
                self._broadcast_chunk(values[begin : begin + CHUNK_BYTES], source, receivers)
                self._on_progress()

    def abort(self) -> None:
        with self._closing:
            if not self._closed:  # else its descriptors may be those of the next group
                self._shut_down()

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._shut_down()
            self._closed = True
        self._bootstrap.close()
        self._paddle_group = None

    def _shut_down(self) -> None:
        self._aborted = True
        self._bootstrap.abort()
        if self._store_port:
            close_listener(self._store_port)
        for fd in self._sockets():
            shut_down(fd)

    def _broadcast_chunk(self, piece: NDArray[np.uint8], source: int, receivers: Collection[int]) -> None:
        if self.rank != source:
            self._control.receive(piece, 0 if self.rank else source)
        elif self.rank:
            self._control.send(piece, 0)  # which passes it on
        if self.rank == 0:
            for receiver in set(receivers) - {0}:
                self._control.send(piece, receiver)

    @contextlib.contextmanager
    def _group_lost_on_error(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, OSError, EOFError) as error:
            raise GroupLostError(self._join.generation, describe_error(error)) from error

    def _open_store(self) -> int:
        """Rank 0's: the store's port is new each time, for those of older generations stay open in this process."""
        from paddle.base import core

        self._older = open_epolls()
        host, _ = endpoint_of(self._join.store, "store")
        for attempt in range(PORT_TRIES):
            port = free_port(host)
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

    def _connect(self, welcome: Welcome) -> None:
        from paddle.base import core

        host, _ = endpoint_of(self._join.store, "store")
        if self._store is None:
            self._older = open_epolls()
            self._store_port = welcome.store_port
            self._store = core.TCPStore(host, welcome.store_port, False, 0, STORE_LIMIT_S)
        for fd in self._sockets():
            disable_delay(fd)
        os.environ["PADDLE_TRAINER_ID"] = str(self.rank)  # read by Paddle when it makes a group
        number, size = self._join.generation, self.world_size
        if self._backend == "gloo":
            self._paddle_group = core.ProcessGroupGloo.create(self._store, self.rank, size, number)
            close_listener(self._store_port)  # all have come, and it would listen to anybody at any address
        else:
            nccl: Any = core  # a build for the CPU has none
            self._paddle_group = nccl.ProcessGroupNCCL.create(
                self._store, self.rank, size, number, NCCL_LIMIT_S * 1000, 0, 0
            )
        self._own = self._new_epolls()
        if self._aborted:  # while the sockets were not there yet
            raise GroupLostError(number, "a rank was lost")

    def _sockets(self) -> list[int]:
        """Return the descriptors of this group's sockets.

        They are of no use to Python, and Paddle doesn't tell them. Those of gloo and of the store's server are watched
        by epolls that have come while it was made; the store's client has the store's port at its other end.
        """
        epolls = self._new_epolls() if self._own is None else self._own
        watched = {fd for epoll in epolls for fd in watched_by(epoll)}
        return [fd for fd in descriptors("socket:") if fd in watched or peer_port(fd) == self._store_port]

    def _new_epolls(self) -> set[int]:
        return set() if self._older is None else open_epolls() - self._older


def describe_error(error: BaseException) -> str:
    """Return why a group was lost, for people: Paddle's own errors name its files and addresses."""
    said = str(error)
    if re.search(r"timed? ?out", said, re.IGNORECASE):
        return "another rank was waited for in vain"
    if re.search(r"reset by peer|closed by peer|broken pipe|socket closed|bad file|not connected", said, re.IGNORECASE):
        return "the connection to another rank has ended"
    lines = re.sub(r"\[\S*/\S+\.(?:cc|h|cpp):\d+\] ?", "", said).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# The generation that a trainer is in: how it comes in, and how it goes on to the next.

MAX_LIVE_GROUPS = 32
"""Groups that a process may have been in: Paddle keeps a few descriptors and threads of each."""

log = get_logger(__name__)

Prepare = Callable[[JoinGeneration], None]
"""What a rank does before it meets the others of a generation, who wait for it there."""

EnterGroup = Callable[[ProcessGroup, JoinGeneration, list[int | None]], None]
"""What brings a new group to one state: it is told the steps that all ranks have come with. Raises GroupLostError."""


class GroupSession:
    """This trainer's place in its present generation, 0 before the first. `names`: of all its processes, by rank."""

    def __init__(self, agent: AgentClient, *, most_live: float = MAX_LIVE_GROUPS) -> None:
        """Be in no generation. `most_live`: in how many groups this process may be."""
        self.agent = agent
        self._most_live = most_live
        self.group: ProcessGroup = SingleProcessGroup()
        self.generation = 0
        self.instances = 1
        self.name = secrets.token_hex(6)
        self.names = [self.name]
        self._backend: CommBackend = "gloo"
        self._made = 0

    def use_backend(self, backend: CommBackend) -> None:
        """Have groups of this kind from now on, and none when the interpreter ends, in whatever way the script did.

        What a group has in C++ may abort a process that ends with it open, and its exit status would be lost.
        """
        self._backend = backend
        atexit.register(self._close_in, os.getpid())

    @property
    def live(self) -> bool:
        """Whether this process can go on to another generation."""
        return self._backend == "gloo" and self._made < self._most_live

    def next_generation(self, step: int | None, get_ready: Prepare, enter: EnterGroup) -> Leave | None:
        """Wait for the next generation that can be entered, and enter it; return Leave when there is none for us.

        `step`: how many this trainer's state has seen, None if it has no state yet.
        """
        since = time.monotonic()
        while True:
            directive = self._wait()
            if isinstance(directive, Leave):
                return directive
            self.generation, self.instances = directive.generation, directive.instances
            get_ready(directive)
            try:
                self.group = self._enter_group(directive, step, enter)
            except GroupLostError as error:
                self.abandon(error, step)
            else:
                log.info(
                    "generation.entered",
                    generation=directive.generation,
                    rank=directive.rank,
                    world_size=directive.world_size,
                    took_s=round(time.monotonic() - since, 3),
                )
                return None

    def abandon(self, error: GroupLostError, step: int | None) -> None:
        """Let go of the group, so that nobody waits for us, and tell the agent. `step`: as in `next`."""
        self.group.abort()
        log.warning("generation.lost", generation=self.generation, reason=error.reason)
        self.agent.send(GenerationLost(generation=self.generation, reason=error.reason, step=step))

    def _close_in(self, process: int) -> None:
        """Do it, but not in a process that the script has forked: the sockets are its parent's."""
        if os.getpid() == process:
            self.group.close()

    def _wait(self) -> Directive:
        while (directive := self.agent.wait_for_directive(self.generation)) is None:
            pass
        return directive

    def _enter_group(self, join: JoinGeneration, step: int | None, enter: EnterGroup) -> ProcessGroup:
        if join.world_size == 1:
            alone = SingleProcessGroup()
            self.names = [self.name]
            enter(alone, join, [step])
            self.group.close()
            return alone
        group = PaddleProcessGroup(join, self._backend, on_progress=self.agent.note_progress)
        self._made += 1
        self.agent.abort_on_loss(join.generation, group.abort, forming=True)
        self.agent.waits_for((step or 0) + 1)
        try:
            welcome = group.meet(self.name, step)
            self.group.close()  # nobody waits in the one before any more: all have met
            self.names = welcome.names
            enter(group, join, welcome.steps)
            self.agent.abort_on_loss(join.generation, group.abort)
        except BaseException:
            group.close()
            raise
        finally:
            self.agent.waits_for(None)
        return group
