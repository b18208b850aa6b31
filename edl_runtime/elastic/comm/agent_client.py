"""The worker's client of its agent: receives directives, sends updates. One per process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, MutableMapping
from typing import NamedTuple

import msgspec

from edl_runtime.elastic.comm.agent_protocol import (
    AbortGeneration,
    AgentMessage,
    Heartbeat,
    JoinGeneration,
    Leave,
    MessageChannel,
    ScriptFailed,
    StartScript,
    WorkerMessage,
    WorkerReady,
)
from edl_runtime.errors import SpecError
from edl_runtime.log import get_logger
from edl_runtime.settings import AGENT_FD

HEARTBEAT_EVERY_S = 0.5

log = get_logger(__name__)

Directive = JoinGeneration | Leave
"""What a worker does next: enter another generation, or end."""


class AgentClient:
    """Receives directives from the agent and sends it updates. Every method is safe from any thread.

    `standalone`: there is no agent, so this process trains alone. `failed`: it has sent ScriptFailed.
    """

    standalone = False
    failed = False

    def send(self, message: WorkerMessage) -> None:
        """Send a message to the agent, if there is one."""

    def directive(self, generation: int) -> Directive | None:
        """Return what a worker in `generation` does next: leave, or join a newer one. None: continue."""
        raise NotImplementedError

    def wait_for_directive(self, generation: int, timeout_s: float | None = None) -> Directive | None:
        """Return `directive(generation)` as soon as there is one, None after `timeout_s`."""
        raise NotImplementedError

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
        self._channel: MessageChannel[AgentMessage] = MessageChannel(end, AgentMessage)
        self._news = threading.Condition()
        self._start: StartScript | None = None
        self._join: JoinGeneration | None = None
        self._leave: Leave | None = None
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
            self._channel.send(message)
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

    def wait_for_directive(self, generation: int, timeout_s: float | None = None) -> Directive | None:
        with self._news:
            return self._news.wait_for(lambda: self._directive(generation), timeout_s)

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
        self._channel.close()

    def handle_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore)  # SIG_IGN would be inherited by programs that the script starts

    def _directive(self, generation: int) -> Directive | None:
        if self._leave is not None:
            return self._leave
        return self._join if self._join is not None and self._join.generation > generation else None

    def _listen(self) -> None:
        try:
            with contextlib.suppress(OSError):
                for message in self._channel.receive():
                    self._note(message)
        except msgspec.DecodeError as error:
            log.warning("message.rejected", error=str(error))
        finally:  # without directives this process must not train on
            self._lost()

    def _note(self, message: AgentMessage) -> None:
        with self._news:
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

    def wait_for_directive(self, generation: int, timeout_s: float | None = None) -> Directive | None:
        del timeout_s  # there is nobody to wait for
        return self.directive(generation)

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
