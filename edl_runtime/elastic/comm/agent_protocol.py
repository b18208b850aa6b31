"""What an instance's agent and its worker process send each other over one socket pair, and the worker's client.

Each message is its length in four bytes, then JSON. The agent's end is in `agent.workers`.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping
from typing import Generic, Literal, NamedTuple, Self, TypeVar, get_args

import msgspec

from edl_runtime.elastic.errors import NoGroupError
from edl_runtime.errors import EdlError, SpecError
from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.settings import AGENT_FD

log = get_logger(__name__)

Gear = Literal["live", "warm", "cold"]
"""How a worker enters a generation: in the running process (live), in a standby that has imported everything (warm), in
a new process (cold)."""

GEARS: tuple[Gear, ...] = get_args(Gear)
"""Fastest first."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=lambda name: name.lower()):
    pass


class StartScript(_Message, frozen=True, kw_only=True):
    """To a standby: set these environment variables and run the script."""

    environ: dict[str, str]


class JoinGeneration(_Message, frozen=True, kw_only=True):
    """To a worker: be this rank of this generation, from the end of the current step on.

    - `store`: "host:port" where rank 0 listens for the others. `token`: authenticates them there.
    - `instances`: most members that the job may have.
    """

    generation: int
    rank: int
    world_size: int
    store: str
    instances: int
    token: str = ""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `store`, an IPv6 address without its brackets."""
        host, _, port = self.store.rpartition(":")
        return host.strip("[]"), int(port)


class AbortGeneration(_Message, frozen=True, kw_only=True):
    """To a worker: this generation has lost a member; stop whatever waits for it."""

    generation: int


class Leave(_Message, frozen=True, kw_only=True):
    """To a worker: end after a step, all ranks after the same one. `checkpoint`: this worker writes it."""

    reason: str
    checkpoint: bool


class SaveCheckpoint(_Message, frozen=True, kw_only=True):
    """To the worker of rank 0: write a checkpoint after the current step, unless there is one that answers `request`.

    `asked_in`: the generation in which it was requested; one of a later generation may find it answered.
    """

    request: int
    asked_in: int


AgentMessage = StartScript | JoinGeneration | AbortGeneration | Leave | SaveCheckpoint


class StandbyLoaded(_Message, frozen=True, kw_only=True):
    """From a standby: everything is imported, and the script can start.

    `gpu`: whether its Paddle has CUDA and sees a device; None where it has not imported Paddle.
    """

    gpu: bool | None = None


class InitCalled(_Message, frozen=True, kw_only=True):
    """From a worker: its script has called `elastic.init`, so it joins generations by itself.

    `checkpoint`: path or URL of its checkpoints, "" for none.
    """

    checkpoint: str = ""


class WorkerReady(_Message, frozen=True, kw_only=True):
    """From a worker: the model is built, and it waits for its first generation.

    `live`: it can enter further generations in this process. `seen`: the generation of the newest checkpoint.
    """

    live: bool
    seen: int = 0


class GenerationEntered(_Message, frozen=True, kw_only=True):
    """From a worker: it is in the generation, with the state that all ranks have, and continues from `step`.

    `source`: where the state came from. `live`: it can enter another generation in this process.
    """

    generation: int
    step: int
    source: Literal["peer", "checkpoint", "start"]
    live: bool


class StepDone(_Message, frozen=True, kw_only=True):
    """From a worker: it has finished a step, at this Unix time. Sent for a generation's first, then a few a second.

    - `clock_s`: the same moment by the monotonic clock, which all processes of a machine share.
    - `waited_s`: how long this worker has waited for other ranks since it began, their sums of gradients included.
    - `samples`: of all ranks so far. `total_steps`: of the whole training, None while unknown.
    - `metrics`: as given to `run.metrics`.
    """

    generation: int
    step: int
    at: float
    clock_s: float
    waited_s: float = 0.0
    epoch: int
    samples: int
    total_steps: int | None = None
    loss: float | None = None
    metrics: dict[str, float] = {}


class Heartbeat(_Message, frozen=True, kw_only=True):
    """From a worker, twice a second, from a thread of its own: its process is not stopped.

    - `waits_for`: the step at which it waits for other ranks, None while it computes.
    - `moves`: how many pieces of state it has read, written, sent or received so far.
    """

    waits_for: int | None = None
    moves: int = 0


class GenerationLost(_Message, frozen=True, kw_only=True):
    """From a worker: the generation's communication has failed. `step`: of the state that it has, None without any."""

    generation: int
    reason: str
    step: int | None = None


class CheckpointSaved(_Message, frozen=True, kw_only=True):
    """From a worker: a checkpoint is complete, since this Unix time. `request`: that it answers, 0 for none."""

    generation: int
    step: int
    epoch: int
    url: str
    took_s: float
    created_at: float
    metrics: dict[str, float] = {}
    request: int = 0


class CheckpointDelayed(_Message, frozen=True, kw_only=True):
    """From a worker: its last checkpoint can't be written; it keeps the weights and retries for `for_s`."""

    step: int
    reason: str
    for_s: float


class Note(_Message, frozen=True, kw_only=True):
    """From a worker: text for the job's events, such as a change of the learning rate.

    `request`: the number of the request for a checkpoint that can't be answered, and `text` why; 0 for none.
    """

    text: str
    request: int = 0


class WorkerFinished(_Message, frozen=True, kw_only=True):
    """From a worker: it has trained everything ("done"), or has ended because it was told to ("left")."""

    step: int
    why: Literal["done", "left"]


FailureCause = Literal["", "import", "memory", "group"]


class ScriptFailed(_Message, frozen=True, kw_only=True):
    """From a worker, its last message: it can't continue, and why.

    - `final`: a restart would fail in the same way.
    - `cause`: an "import" failed, there was too little "memory", or no "group" of these instances can be formed.
    """

    reason: str
    final: bool
    cause: FailureCause = ""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return the message for an error: invalid input is final."""
        text = "".join(traceback.format_exception_only(error)).strip()
        cause: FailureCause = ""
        if isinstance(error, ImportError | SyntaxError):
            cause = "import"
        elif isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # PyTorch's
            cause = "memory"
        elif isinstance(error, NoGroupError):
            cause = "group"
        final = cause == "group" or (isinstance(error, EdlError) and isinstance(error, ValueError))
        return cls(reason=text, final=final, cause=cause)


WorkerMessage = (
    StandbyLoaded
    | InitCalled
    | WorkerReady
    | GenerationEntered
    | StepDone
    | Heartbeat
    | GenerationLost
    | CheckpointSaved
    | CheckpointDelayed
    | Note
    | WorkerFinished
    | ScriptFailed
)


# Encoding

MAX_MESSAGE_BYTES = 1 << 20  # environment variables are the largest content

_HEAD = struct.Struct("!I")

MessageT = TypeVar("MessageT")


def encode_message(message: msgspec.Struct) -> bytes:
    """Return the message as bytes. Raises ValueError above MAX_MESSAGE_BYTES."""
    body = msgspec.json.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes, allowed are {MAX_MESSAGE_BYTES}")
    return _HEAD.pack(len(body)) + body


class MessageDecoder(Generic[MessageT]):
    """Splits a stream of bytes into messages of the union `kinds`."""

    def __init__(self, kinds: object) -> None:
        self._decoder: JsonDecoder[MessageT] = JsonDecoder(kinds)
        self._pending = bytearray()

    @property
    def missing(self) -> int:
        """How many bytes the present message still needs, as far as is known: what follows may be no message."""
        if len(self._pending) < _HEAD.size:
            return _HEAD.size - len(self._pending)
        (size,) = _HEAD.unpack_from(self._pending)
        return int(_HEAD.size + size - len(self._pending))

    def feed(self, data: bytes) -> Iterator[MessageT]:
        """Yield the messages that `data` completes. Raises msgspec.DecodeError for anything else."""
        self._pending += data
        while len(self._pending) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._pending)
            if size > MAX_MESSAGE_BYTES:
                raise msgspec.DecodeError(f"a message of {size} bytes, allowed are {MAX_MESSAGE_BYTES}")
            end = _HEAD.size + size
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_HEAD.size : end])
            del self._pending[:end]
            yield self._decoder.decode(body)


# The worker's client of its agent

HEARTBEAT_EVERY_S = 0.5

INSIST_AFTER_S = 0.5
"""How long a rank with a directive trains on because others have none yet."""

Directive = JoinGeneration | Leave
"""What a worker does next: enter another generation, or end."""


class AgentClient:
    """Receives directives from the agent and sends it updates. Every method is safe from any thread.

    `standalone`: there is no agent, so this process trains alone. `failed`: it has sent ScriptFailed.
    """

    standalone = False
    failed = False
    _told_at = -math.inf

    def send(self, message: WorkerMessage) -> None:
        """Send a message to the agent, if there is one."""

    def directive(self, generation: int) -> Directive | None:
        """Return what a worker in `generation` does next: leave, or join a newer one. None: continue."""
        raise NotImplementedError

    def wait_for_directive(self, generation: int) -> Directive:
        """Return `directive(generation)` as soon as there is one."""
        raise NotImplementedError

    def votes_to_stop(self, generation: int, world_size: int) -> int:
        """Return this rank's part of the `world_size` votes that end `generation`, at the same step for all ranks.

        It has one once it has a directive: so all train on until the last rank has one, too, instead of waiting for it.
        After `INSIST_AFTER_S` it has all, because it may be the only one with a directive.
        """
        if self.directive(generation) is None:
            return 0
        return world_size if time.monotonic() >= self._told_at + INSIST_AFTER_S else 1

    @property
    def checkpoint_request(self) -> SaveCheckpoint | None:
        """The agent's last request for a checkpoint, None without one."""
        return None

    def abort_on_loss(self, generation: int, abort: Callable[[], None], *, forming: bool = False) -> None:
        """Call `abort`, from another thread and perhaps at once, when `generation` has lost a member.

        While it is `forming`, also when there is a newer directive: its last member may never come.
        """

    def waits_for(self, step: int | None) -> None:
        """Report the step at which this worker waits for other ranks, None while it computes."""

    def note_progress(self) -> None:
        """Report that a piece of state was read, written, sent or received, so that this worker counts as alive."""

    def handle_signals(self) -> None:
        """Handle SIGTERM from now on. Call it from the main thread, after imports that set signal handlers."""


class SocketAgentClient(AgentClient):
    """Client over a socket to the agent. Listens and sends heartbeats in threads of its own.

    The process exits with status 1 when the agent is gone: without one it would be a second training. The agent
    handles signals; SIGTERM and SIGINT do nothing here. `called`: the script has called `elastic.init`.
    """

    def __init__(self, end: socket.socket, *, lost: Callable[[], None] | None = None) -> None:
        """Listen from now on. `lost` is called instead of the exit when the agent is gone."""
        self._lost = lost or _exit_without_agent
        self.called = False
        self._end = end
        self._sending = threading.Lock()
        self._news = threading.Condition()
        self._start: StartScript | None = None
        self._join: JoinGeneration | None = None
        self._leave: Leave | None = None
        self._save: SaveCheckpoint | None = None
        self._aborted = 0  # the newest generation that has lost a member
        self._guarded: _GuardedGeneration | None = None
        self._waits_for: int | None = None
        self._moves = 0
        self._closed = threading.Event()
        bodies = (("edl agent listener", self._listen), ("edl heartbeat", self._heartbeat))
        self._threads = [threading.Thread(target=body, name=name, daemon=True) for name, body in bodies]
        for thread in self._threads:
            thread.start()

    @classmethod
    def from_fd(cls, fd: int) -> SocketAgentClient:
        """Return the client over this open socket, and make it the process's current one."""
        global _current  # noqa: PLW0603 -- a process has one agent, and its standby hands the client to the script
        os.set_inheritable(fd, False)
        os.environ[AGENT_FD] = ""
        _current = cls(socket.socket(fileno=fd))
        return _current

    def send(self, message: WorkerMessage) -> None:
        self.failed |= isinstance(message, ScriptFailed)
        try:
            with self._sending:
                self._end.sendall(encode_message(message))
        except OSError:
            self._lost()

    def wait_for_start(self) -> StartScript:
        """Return the agent's StartScript once it has come. For a standby."""
        with self._news:
            self._news.wait_for(lambda: self._start is not None)
            assert self._start is not None  # noqa: S101 -- just waited for
            return self._start

    def remove_start_variables(self, environ: MutableMapping[str, str]) -> None:
        """Remove the variables that came with StartScript: they describe one generation, for scripts without EDL."""
        for name in self._start.environ if self._start else ():
            environ.pop(name, None)

    def directive(self, generation: int) -> Directive | None:
        with self._news:
            return self._directive(generation)

    def wait_for_directive(self, generation: int) -> Directive:
        with self._news:
            while (directive := self._directive(generation)) is None:
                self._news.wait()
            return directive

    @property
    def checkpoint_request(self) -> SaveCheckpoint | None:
        return self._save

    def abort_on_loss(self, generation: int, abort: Callable[[], None], *, forming: bool = False) -> None:
        with self._news:
            self._guarded = _GuardedGeneration(generation, abort, forming)
            is_over = self._is_over(self._guarded)
        if is_over:
            abort()

    def waits_for(self, step: int | None) -> None:
        self._waits_for = step

    def note_progress(self) -> None:
        self._moves += 1  # two threads may race here: the agent only needs to see that the number has changed

    def close(self) -> None:
        """Stop the threads and close the socket, once the agent is gone."""
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self._end.close()

    def handle_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore)  # SIG_IGN would be inherited by programs that the script starts

    def _directive(self, generation: int) -> Directive | None:
        if self._leave is not None:
            return self._leave
        return self._join if self._join is not None and self._join.generation > generation else None

    def _listen(self) -> None:
        decoder: MessageDecoder[AgentMessage] = MessageDecoder(AgentMessage)
        try:
            with contextlib.suppress(OSError):
                while data := self._end.recv(1 << 16):
                    for message in decoder.feed(data):
                        self._note(message)
        except msgspec.DecodeError as error:
            log.warning("message.rejected", error=str(error))
        finally:  # without directives this process must not train on
            self._lost()

    def _note(self, message: AgentMessage) -> None:
        with self._news:
            if isinstance(message, Directive):
                self._told_at = time.monotonic()
            match message:
                case StartScript():
                    self._start = message
                case JoinGeneration():
                    if self._join is None or message.generation > self._join.generation:
                        self._join = message
                case Leave():
                    # a later Leave doesn't cancel the request for a checkpoint
                    asked = message.checkpoint or (self._leave is not None and self._leave.checkpoint)
                    self._leave = Leave(reason=message.reason, checkpoint=asked)
                case SaveCheckpoint():
                    self._save = message
                case AbortGeneration():
                    self._aborted = max(self._aborted, message.generation)
            self._news.notify_all()
            guarded = self._guarded
            is_over = guarded is not None and self._is_over(guarded)
        if guarded is not None and is_over:
            guarded.abort()

    def _is_over(self, guarded: _GuardedGeneration) -> bool:
        superseded = guarded.forming and self._directive(guarded.generation) is not None
        return superseded or self._aborted >= guarded.generation

    def _heartbeat(self) -> None:
        while not self._closed.is_set():
            self.send(Heartbeat(waits_for=self._waits_for, moves=self._moves))
            self._closed.wait(HEARTBEAT_EVERY_S)


class _GuardedGeneration(NamedTuple):
    generation: int
    abort: Callable[[], None]
    forming: bool


class StandaloneClient(AgentClient):
    """Client of a script that runs without an agent: one generation, of this process alone, until SIGTERM."""

    standalone = True

    def __init__(self) -> None:
        self._generation = 1
        self._leave: Leave | None = None

    def send(self, message: WorkerMessage) -> None:
        if isinstance(message, WorkerReady):
            self._generation = message.seen + 1

    def directive(self, generation: int) -> Directive | None:
        if self._leave is not None or generation >= self._generation:
            return self._leave
        return JoinGeneration(generation=self._generation, rank=0, world_size=1, store="", instances=1)

    def wait_for_directive(self, generation: int) -> Directive:
        directive = self.directive(generation)
        if directive is None:
            raise AssertionError("there is nobody to wait for")
        return directive

    def handle_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._terminated)

    def _terminated(self, *_: object) -> None:
        self._leave = Leave(reason="SIGTERM", checkpoint=True)


def connect_to_agent(environ: MutableMapping[str, str]) -> AgentClient:
    """Return this process's client: of its agent, or of the standby that it began as, or a StandaloneClient.

    Removes from `environ` what the agent has set for scripts without EDL. Raises SpecError in a process that is not the
    script itself, but was started by it or by another program.
    """
    if _current is not None:
        _current.called = True
        _current.remove_start_variables(environ)
        return _current
    fd = environ.get(AGENT_FD)
    if fd == "":
        given = "a process that another program has started, such as a shell script, `python -m` or a subprocess"
        allowed = (
            "the script that the agent runs itself, as in `edl run train.py`; a script that another interpreter runs "
            "has to import edl_runtime.elastic in its own file"
        )
        raise SpecError("elastic.init", given, allowed)
    return SocketAgentClient.from_fd(int(fd)) if fd else StandaloneClient()


_current: SocketAgentClient | None = None


def _ignore(*_: object) -> None:
    pass


def _exit_without_agent() -> None:
    log.warning("agent.disconnected")
    os._exit(1)


_PR_SET_PDEATHSIG = 1  # of prctl(2)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which has just started it, dies. Linux only.

    Raises SystemExit if the parent is gone already.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("edl: the process that started this one is gone")
