"""The process group of one generation, over sockets or NCCL, and the session that moves a worker between groups.

A process is in one group after the other, each of its own size. Paddle's global group is not touched.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from edl_runtime.elastic.comm.agent_protocol import AgentClient, GenerationLost, JoinGeneration, Leave
from edl_runtime.elastic.comm.bootstrap import Bootstrap, Welcome, listen
from edl_runtime.elastic.errors import ElasticError, GroupLostError, NoGroupError
from edl_runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

STORE_LIMIT_S = 10
"""Timeout of a store that rank 0 has announced."""

NCCL_LIMIT_S = 30
PORT_TRIES = 3  # another process may take a free port before the store has bound it

CHUNK_BYTES = 1 << 20
"""State is sent in pieces of so many bytes: each counts as progress, and is passed on before the next."""

SMALL_SUM_BYTES = 1 << 14
"""Up to so many bytes are summed by rank 0: that takes two messages one after the other, the ring two for each rank."""


class ProcessGroup:
    """The ranks of one generation: here a group of one rank, which has nothing to exchange.

    In a group of several whatever waits for another rank raises GroupLostError when one is lost, and NoGroupError for
    what would fail in a later group of these ranks, too.
    """

    rank = 0
    world_size = 1

    def all_reduce(self, values: Any) -> None:
        """Replace the values of a contiguous array by their sums over all ranks: the same bits everywhere.

        With NCCL also those of a tensor on a GPU; then all ranks have to call it within seconds of each other, as after
        `all_reduce_counts`.
        """

    def all_reduce_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums over all ranks."""
        return counts

    def pass_on(self, values: NDArray[np.uint8], *, receives: bool, sends: bool) -> None:
        """Fill `values` with the bytes of the rank before this one (`receives`), give them to the next (`sends`)."""

    def abort(self) -> None:
        """Interrupt whatever waits, in any thread. The group can't be used afterwards."""

    def close(self) -> None:
        """Close the sockets; ranks that still use the group notice."""


class SocketProcessGroup(ProcessGroup):
    """A group whose ranks are connected by sockets: each with rank 0, and in a ring."""

    def __init__(
        self,
        join: JoinGeneration,
        host: str = "127.0.0.1",
        *,
        root: socket.socket | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`connect` has to follow.

        - `host`: the address at which the others reach this rank. `root`: where it listens already as rank 0, if so.
        - `on_progress`: is called after each piece that is sent or received.
        """
        self.rank = join.rank
        self.world_size = join.world_size
        self._join = join
        self._on_progress = on_progress
        self._bootstrap = Bootstrap(join, host, root)

    def connect(self, name: str, step: int | None) -> Welcome:
        """Connect with all ranks and return what they have sent. Raises GroupLostError, NoGroupError."""
        with self._group_lost_on_error():
            welcome, self._control = self._bootstrap.run(name, step, self._open_store)
            self._ring = self._bootstrap.connect_ring(welcome)
        return welcome

    def all_reduce(self, values: Any) -> None:
        with self._group_lost_on_error():
            if values.nbytes <= SMALL_SUM_BYTES:
                values[...] = self._control.all_reduce(values)
            else:
                self._ring.all_reduce(values)

    def all_reduce_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        with self._group_lost_on_error():
            return self._control.all_reduce(counts)

    def pass_on(self, values: NDArray[np.uint8], *, receives: bool, sends: bool) -> None:
        with self._group_lost_on_error():
            for begin in range(0, len(values), CHUNK_BYTES):
                piece = values[begin : begin + CHUNK_BYTES]
                if receives:
                    self._ring.receive(piece)
                if sends:
                    self._ring.send(piece)
                self._on_progress()

    def abort(self) -> None:
        self._bootstrap.abort()

    def close(self) -> None:
        self._bootstrap.abort()
        self._bootstrap.close()

    def _open_store(self) -> int:
        return 0

    @contextlib.contextmanager
    def _group_lost_on_error(self) -> Iterator[None]:
        try:
            yield
        except ElasticError:
            raise
        except Exception as error:
            if recurs(error):
                raise NoGroupError(describe_error(error)) from error
            raise GroupLostError(self._join.generation, describe_error(error)) from error


class NcclProcessGroup(SocketProcessGroup):
    """A group that sums tensors on its GPUs by Paddle's NCCL.

    It has not been run on GPUs: treat it as written only. `abort` can't interrupt NCCL, so its generations are never
    live: the agent ends such a worker.
    """

    _store: Any = None

    def connect(self, name: str, step: int | None) -> Welcome:
        from paddle.base import core

        welcome = super().connect(name, step)
        nccl: Any = core  # a build for the CPU has none
        with self._group_lost_on_error():
            host, _ = self._join.address
            if self._store is None:
                self._store = nccl.TCPStore(host, welcome.store_port, False, 0, STORE_LIMIT_S)
            os.environ["PADDLE_TRAINER_ID"] = str(self.rank)  # read by Paddle when it makes a group
            self._nccl = nccl.ProcessGroupNCCL.create(
                self._store, self.rank, self.world_size, self._join.generation, NCCL_LIMIT_S * 1000, 0, None
            )
        return welcome

    def all_reduce(self, values: Any) -> None:
        if isinstance(values, np.ndarray):
            super().all_reduce(values)
            return
        with self._group_lost_on_error():
            self._nccl.allreduce(values).wait()

    def close(self) -> None:
        super().close()
        self._nccl = None

    def _open_store(self) -> int:
        """Open rank 0's store, at a new port."""
        from paddle.base import core

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
                return port
        raise AssertionError("unreachable")


def free_port(host: str) -> int:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as listener:
        return int(listener.getsockname()[1])


def recurs(error: Exception) -> bool:
    """Whether the next group of the same ranks would fail with this error, too: no connection was lost."""
    if isinstance(error, NotImplementedError) or not isinstance(error, RuntimeError | ValueError | OSError | EOFError):
        return True
    return re.search("duplicate gpu|invalid ?usage|not compiled with", str(error), re.IGNORECASE) is not None


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

log = get_logger(__name__)

Prepare = Callable[[JoinGeneration], None]
"""Called before a rank connects to the others of a generation, who wait for it there."""

EnterGroup = Callable[[ProcessGroup, JoinGeneration, list[int | None]], None]
"""Brings a new group to one state, by the steps of all ranks. Raises GroupLostError."""


class GroupSession:
    """This worker's group and generation, 0 before the first. `names`: of all its processes, by rank."""

    def __init__(self, agent: AgentClient, host: str = "127.0.0.1") -> None:
        """`host`: the address at which the others reach this worker."""
        self.agent = agent
        self._host = host
        self.group = ProcessGroup()
        self.generation = 0
        self.instances = 1
        self.name = secrets.token_hex(6)
        self.names = [self.name]
        self._group_kind: type[SocketProcessGroup] = SocketProcessGroup
        self._roots: dict[int, socket.socket] = {}  # where this worker listens as rank 0 of generations to come

    def begin(self, *, nccl: bool) -> None:
        """Sum tensors on GPUs by NCCL from now on, if so; and close the group before the interpreter exits.

        The others then notice it at once. NCCL's threads may abort the process at its exit, whose status would be lost.
        """
        self._group_kind = NcclProcessGroup if nccl else SocketProcessGroup
        atexit.register(self._close_in, os.getpid())

    @property
    def live(self) -> bool:
        """Whether this process can enter another generation."""
        return self._group_kind is SocketProcessGroup

    def next_generation(self, step: int | None, prepare: Prepare, enter: EnterGroup) -> Leave | None:
        """Wait for the next generation that can be entered, and enter it; return Leave when this worker has to end.

        `step`: how many steps its state has seen, None without a state.
        """
        since = time.monotonic()
        while True:
            directive = self.agent.wait_for_directive(self.generation)
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

    def votes_to_stop(self) -> int:
        """Return this rank's votes for the end of its generation, as `AgentClient.votes_to_stop`.

        Rank 0 of the next one listens before it votes for it: others that come first would have to try again.
        """
        match self.agent.directive(self.generation):
            case JoinGeneration(rank=0, generation=number) as join if join.world_size > 1 and number not in self._roots:
                with contextlib.suppress(OSError):  # it is tried again, and reported, when the ranks meet
                    self._roots[number] = listen(join.address, join.world_size)
        return self.agent.votes_to_stop(self.generation, self.group.world_size)

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
        root = self._roots.pop(join.generation, None)
        while self._roots:
            self._roots.popitem()[1].close()
        if join.world_size == 1:
            alone = ProcessGroup()
            self.names = [self.name]
            enter(alone, join, [step])
            self.group.close()
            return alone
        group = self._group_kind(join, self._host, root=root, on_progress=self.agent.note_progress)
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
