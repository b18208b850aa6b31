"""The process group of one generation, over Paddle's gloo or NCCL, and the session that moves a worker between groups.

A process is in one group after the other, each of its own size. Paddle's global group is not touched. Tensors are on
the CPU for gloo and on the process's one GPU for NCCL.
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
from typing import TYPE_CHECKING, Any

import numpy as np

from edl_runtime.elastic.comm.agent_protocol import AgentClient, CommBackend, GenerationLost, JoinGeneration, Leave
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

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

STORE_LIMIT_S = 10
"""Timeout of a store that rank 0 has announced."""

NCCL_LIMIT_S = 30
PORT_TRIES = 3  # another process may take a free port before the store has bound it

CHUNK_BYTES = 1 << 20
"""State is sent in pieces of so many bytes: each counts as progress, and rank 0 forwards it before the next."""


class ProcessGroup:
    """The ranks of one generation: here a group of one rank, which has nothing to exchange.

    In a group of several whatever waits for another rank raises GroupLostError when one is lost.
    """

    rank = 0
    world_size = 1

    def all_reduce(self, values: Any) -> None:
        """Replace the tensor's values by their sums over all ranks: the same bits everywhere.

        All ranks have to call it within seconds of each other, as after `all_reduce_counts`.
        """

    def all_reduce_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums over all ranks. Waits for all of them, without a timeout."""
        return counts

    def broadcast(self, values: NDArray[np.uint8], source: int, receivers: Collection[int]) -> None:
        """Copy the bytes from the source to the receivers, which call it as well. Rank 0 is among them."""

    def abort(self) -> None:
        """Interrupt whatever waits, in any thread. The group can't be used afterwards."""

    def close(self) -> None:
        """Close the sockets; ranks that still use the group notice."""


class PaddleProcessGroup(ProcessGroup):
    """A group over Paddle's gloo, or NCCL.

    NCCL has not been run on GPUs: treat it as written only. `abort` can't interrupt it, so its generations are never
    live: the agent ends such a worker.
    """

    def __init__(
        self, join: JoinGeneration, backend: CommBackend, *, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """`connect` has to follow. `on_progress` is called after each piece that is sent or received."""
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
        self._older: set[int] | None = None  # epoll descriptors from before this group
        self._own: set[int] | None = None  # its own, once it is connected
        self._aborted = False
        self._closed = False
        self._closing = threading.Lock()

    def connect(self, name: str, step: int | None) -> Welcome:
        """Connect with all ranks and return what they have sent. Raises GroupLostError."""
        welcome, self._control = self._bootstrap.run(name, step, self._open_store)
        with self._group_lost_on_error():
            self._open_group(welcome)
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
            if not self._closed:  # else the next group may have its descriptors
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
            self._control.send(piece, 0)  # which forwards it
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
        """Open rank 0's store, at a new port: the stores of older generations stay open in this process."""
        from paddle.base import core

        self._older = open_epolls()
        host, _ = self._join.address
        for attempt in range(PORT_TRIES):
            port = free_port(host)
            try:
                # for 0 ranks: to wait for them is done here, and takes the store 90 ms
                self._store = core.TCPStore(host, port, True, 0, STORE_LIMIT_S)
            except (RuntimeError, ValueError, OSError):
                if attempt + 1 == PORT_TRIES:
                    raise
            else:
                self._store_port = port
                return port
        raise AssertionError("unreachable")

    def _open_group(self, welcome: Welcome) -> None:
        from paddle.base import core

        host, _ = self._join.address
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
            close_listener(self._store_port)  # all ranks are connected; it would accept anybody at any address
        else:
            nccl: Any = core  # a build for the CPU has none
            self._paddle_group = nccl.ProcessGroupNCCL.create(
                self._store, self.rank, size, number, NCCL_LIMIT_S * 1000, 0, 0
            )
        self._own = self._new_epolls()
        if self._aborted:  # before there were sockets to shut down
            raise GroupLostError(number, "a rank was lost")

    def _sockets(self) -> list[int]:
        """Return the descriptors of this group's sockets.

        Those of gloo and of the store's server are watched by epolls that were made with the group; the store's client
        has the store's port at its other end.
        """
        epolls = self._new_epolls() if self._own is None else self._own
        watched = {fd for epoll in epolls for fd in watched_by(epoll)}
        return [fd for fd in descriptors("socket:") if fd in watched or peer_port(fd) == self._store_port]

    def _new_epolls(self) -> set[int]:
        return set() if self._older is None else open_epolls() - self._older


def describe_error(error: BaseException) -> str:
    """Return why a group was lost, for people: Paddle's own errors name its files and addresses."""
    text = str(error)
    if re.search(r"timed? ?out", text, re.IGNORECASE):
        return "another rank did not respond in time"
    if re.search(r"reset by peer|closed by peer|broken pipe|socket closed|bad file|not connected", text, re.IGNORECASE):
        return "the connection to another rank has ended"
    lines = re.sub(r"\[\S*/\S+\.(?:cc|h|cpp):\d+\] ?", "", text).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# The session: from one generation's group to the next.

MAX_LIVE_GROUPS = 32
"""Groups that a process may make: Paddle leaks a few descriptors and threads with each."""

log = get_logger(__name__)

Prepare = Callable[[JoinGeneration], None]
"""Called before a rank connects to the others of a generation, who wait for it there."""

EnterGroup = Callable[[ProcessGroup, JoinGeneration, list[int | None]], None]
"""Brings a new group to one state, by the steps of all ranks. Raises GroupLostError."""


class GroupSession:
    """This worker's group and generation, 0 before the first. `names`: of all its processes, by rank."""

    def __init__(self, agent: AgentClient, *, most_live: float = MAX_LIVE_GROUPS) -> None:
        """`most_live`: how many groups this process may make."""
        self.agent = agent
        self._most_live = most_live
        self.group = ProcessGroup()
        self.generation = 0
        self.instances = 1
        self.name = secrets.token_hex(6)
        self.names = [self.name]
        self._backend: CommBackend = "gloo"
        self._made = 0

    def use_backend(self, backend: CommBackend) -> None:
        """Use this backend from now on, and close the group when the interpreter exits.

        An open group's C++ threads may abort the process at exit, and its exit status would be lost.
        """
        self._backend = backend
        atexit.register(self._close_in, os.getpid())

    @property
    def live(self) -> bool:
        """Whether this process can enter another generation."""
        return self._backend == "gloo" and self._made < self._most_live

    def next_generation(self, step: int | None, prepare: Prepare, enter: EnterGroup) -> Leave | None:
        """Wait for the next generation that can be entered, and enter it; return Leave when this worker has to end.

        `step`: how many steps its state has seen, None without a state.
        """
        since = time.monotonic()
        while True:
            while (directive := self.agent.wait_for_directive(self.generation)) is None:
                pass
            if isinstance(directive, Leave):
                return directive
            self.generation, self.instances = directive.generation, directive.instances
            prepare(directive)
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
        """Abort the group, so that no rank waits for this one, and report the loss. `step`: as in `next_generation`."""
        self.group.abort()
        log.warning("generation.lost", generation=self.generation, reason=error.reason)
        self.agent.send(GenerationLost(generation=self.generation, reason=error.reason, step=step))

    def _close_in(self, process: int) -> None:
        """Close the group, but not in a fork of this process: the sockets are its parent's."""
        if os.getpid() == process:
            self.group.close()

    def _enter_group(self, join: JoinGeneration, step: int | None, enter: EnterGroup) -> ProcessGroup:
        if join.world_size == 1:
            alone = ProcessGroup()
            self.names = [self.name]
            enter(alone, join, [step])
            self.group.close()
            return alone
        group = PaddleProcessGroup(join, self._backend, on_progress=self.agent.note_progress)
        self._made += 1
        self.agent.abort_on_loss(join.generation, group.abort, forming=True)
        self.agent.waits_for((step or 0) + 1)
        try:
            welcome = group.connect(self.name, step)
            self.group.close()  # all ranks are here, so none waits in the group before
            self.names = welcome.names
            enter(group, join, welcome.steps)
            self.agent.abort_on_loss(join.generation, group.abort)
        except BaseException:
            group.close()
            raise
        finally:
            self.agent.waits_for(None)
        return group
