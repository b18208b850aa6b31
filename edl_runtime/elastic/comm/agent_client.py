"""The worker's client of its agent: receives directives, sends updates. One per process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, MutableMapping
from typing import NamedTuple, Protocol

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

"""The variable that names the socket to the agent, in a process that an agent has started.

Empty once that process has taken it: for the programs that this starts, or that take its place.
"""

HEARTBEAT_EVERY_S = 0.5

log = get_logger(__name__)

Directive = JoinGeneration | Leave
"""What a trainer is to do next: be in another generation, or end."""


class AgentClient(Protocol):
    """What tells a training of generations. Every method is safe from any thread."""

    @property
    def standalone(self) -> bool:
        """Whether nobody else can be in this training."""
        ...

    @property
    def failed(self) -> bool:
        """Whether this process has said that it failed."""
        ...

    def send(self, message: WorkerMessage) -> None:
        """Tell the agent, if there is one. An agent that is gone takes this process with it."""
        ...

    def directive(self, generation: int) -> Directive | None:
        """Return what whoever is in `generation` is to do next: end, or be in a newer one. None to go on."""
        ...

    def wait_for_directive(self, generation: int, timeout_s: float | None = None) -> Directive | None:
        """Return `wish(generation)` as soon as there is one, None after `timeout_s`."""
        ...

    def abort_on_loss(self, generation: int, abort: Callable[[], None], *, forming: bool = False) -> None:
        """Have `abort` called, by another thread and perhaps at once, when `generation` has lost a member.

        While it is `forming`, also when there is another wish: nobody waits until the last one comes then.
        """
        ...

    def waits_for(self, step: int | None) -> None:
        """Note the step at whose end, or before which, this trainer waits for others, None while it computes."""
        ...

    def note_progress(self) -> None:
        """Note that one more piece of state was read, written, given or taken: who waits for this trainer may do so."""
        ...

    def handle_signals(self) -> None:
        """Handle SIGTERM from now on. For the main thread, once all is imported that handles signals as well."""
        ...


class SocketAgentClient:
    """The link to an agent. Made of its end of the socket; listens and beats in threads of its own.

    The process ends at once, with status 1, when the agent is gone: whoever trains without one would be a second
    training. Signals are the agent's business, SIGTERM and SIGINT do nothing here. `called`: the script has called
    `elastic.init`.
    """

    standalone = False

    def __init__(self, end: socket.socket, *, lost: Callable[[], None] | None = None) -> None:
        """Listen and beat from now on. `lost` is what is done instead when the agent is gone."""
        self._lost = lost or _exit_without_agent
        self.failed = False
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
        bodies = (("edl link", self._listen), ("edl beat", self._heartbeat))
        self._threads = [threading.Thread(target=body, name=name, daemon=True) for name, body in bodies]
        for thread in self._threads:
            thread.start()

    @classmethod
    def from_fd(cls, fd: int) -> SocketAgentClient:
        """Return the link over this open socket, as which `current` knows it from now on."""
        global _current  # noqa: PLW0603 -- a process has one agent, and its standby hands the link to the script
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
        """Return the agent's Start, once it has come. For a standby."""
        with self._news:
            self._news.wait_for(lambda: self._start is not None)
            assert self._start is not None  # noqa: S101 -- just waited for
            return self._start

    def remove_start_variables(self, environ: MutableMapping[str, str]) -> None:
        """Remove the variables that came with the start: of one generation, for scripts that know nothing of others."""
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
        self._moves += 1  # of two threads at once one may be left out: it is enough that there is another number

    def close(self) -> None:
        """End the threads and let go of the socket, once the agent is gone."""
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
            log.warning("agent.unintelligible", error=str(error))
        finally:  # who can't hear its agent any more is not to train on
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
                    # to be asked for a checkpoint once is enough
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


class StandaloneClient:
    """The link of a script that a person has started: one generation, of this process alone, until SIGTERM."""

    standalone = True
    failed = False

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

    def abort_on_loss(self, generation: int, abort: Callable[[], None], *, forming: bool = False) -> None:
        pass

    def waits_for(self, step: int | None) -> None:
        pass

    def note_progress(self) -> None:
        pass

    def handle_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._terminated)

    def _terminated(self, *_: object) -> None:
        self._leave = Leave(reason="SIGTERM", checkpoint=True)


def connect_to_agent(environ: MutableMapping[str, str]) -> AgentClient:
    """Return the link to this process's agent, that of its standby if it began as one; `NoLink` without an agent.

    What the agent has put into `environ` for scripts that don't come here is gone then. Raises SpecError in a process
    that is not the script itself, but was started by it or by another program.
    """
    if _current is not None:
        _current.called = True
        _current.remove_start_variables(environ)
        return _current
    fd = environ.get(AGENT_FD)
    if fd == "":
        given = "a process that another program has started, as a shell script, `python -m` or a helper of the script"
        allowed = (
            "the script that the agent runs itself, as in `edl run train.py`; one that another interpreter runs has to "
            "import edl_runtime.elastic in its own file"
        )
        raise SpecError("elastic.init", given, allowed)
    return SocketAgentClient.from_fd(int(fd)) if fd else StandaloneClient()


def current_client() -> SocketAgentClient | None:
    """Return this process's link to its agent, None if none was made."""
    return _current


_current: SocketAgentClient | None = None


def _ignore(*_: object) -> None:
    pass


def _exit_without_agent() -> None:
    log.warning("trainer.agent_lost")
    os._exit(1)


# What a process does so that it does not outlive the one that has started it.

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when `parent` dies, which has just started it, where it can (Linux).

    Raises SystemExit if that has died by now.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("edl: the process that started this one is gone")
