"""A trainer's end of the line to its agent."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from edl_runtime.elastic.comm import agent_client as links
from edl_runtime.elastic.comm.agent_client import SocketAgentClient, StandaloneClient
from edl_runtime.elastic.comm.agent_protocol import (
    AbortGeneration,
    Heartbeat,
    JoinGeneration,
    Leave,
    MessageChannel,
    ScriptFailed,
    StartScript,
    WorkerMessage,
    WorkerReady,
    encode_message,
)
from edl_runtime.errors import SpecError

Line = tuple[SocketAgentClient, MessageChannel[WorkerMessage]]
"""Both its ends."""


def joined(generation: int) -> JoinGeneration:
    return JoinGeneration(generation=generation, rank=0, world_size=1, store="", instances=4)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set where the process would end itself."""
    monkeypatch.setattr(links, "HEARTBEAT_EVERY_S", 0.01)
    return threading.Event()


@pytest.fixture
def line(ended: threading.Event) -> Iterator[Line]:
    ours, theirs = socket.socketpair()
    link = SocketAgentClient(theirs, lost=ended.set)
    yield link, MessageChannel(ours, WorkerMessage)
    ours.close()
    assert ended.wait(60)
    link.close()


def test_the_newest_generation_is_wished_for(line: Line) -> None:
    """An older one that comes late is none, and who is in it is left alone."""
    link, agent = line
    assert link.wait_for_directive(0, timeout_s=0) is None
    agent.send(StartScript(environ={"A": "b"}))
    agent.send(joined(3))
    agent.send(joined(2))
    assert link.wait_for_start().environ == {"A": "b"}
    assert link.wait_for_directive(0, timeout_s=60) == joined(3)
    assert link.directive(3) is None
    agent.send(joined(4))
    assert link.wait_for_directive(3, timeout_s=60) == joined(4)


def test_to_leave_comes_first_and_asked_is_asked(line: Line) -> None:
    """A checkpoint that was asked for once is written, whatever else is said."""
    link, agent = line
    agent.send(Leave(reason="deadline", checkpoint=True))
    agent.send(Leave(reason="excluded", checkpoint=False))
    agent.send(joined(9))
    deadline = time.monotonic() + 60
    while link.wait_for_directive(0, timeout_s=60) != Leave(reason="excluded", checkpoint=True):
        assert time.monotonic() < deadline


def test_an_abort_is_for_its_generation_also_when_it_comes_first(line: Line) -> None:
    """A later generation is not let go of because of it."""
    link, agent = line
    aborted = threading.Event()
    link.abort_on_loss(2, aborted.set)
    agent.send(AbortGeneration(generation=1))
    agent.send(joined(2))
    link.wait_for_directive(1, timeout_s=60)
    assert not aborted.is_set()
    agent.send(AbortGeneration(generation=2))
    assert aborted.wait(60)
    late = threading.Event()
    link.abort_on_loss(2, late.set)
    assert late.is_set()
    later = threading.Event()
    link.abort_on_loss(3, later.set)
    assert not later.is_set()


def test_a_forming_generation_is_let_go_for_a_newer_one(line: Line) -> None:
    """Who never comes to it would be waited for else; one that is up goes on until a step's end."""
    link, agent = line
    agent.send(joined(2))
    link.wait_for_directive(1, timeout_s=60)
    let_go = threading.Event()
    link.abort_on_loss(2, let_go.set, forming=True)
    assert not let_go.is_set()
    link.abort_on_loss(2, let_go.set)
    agent.send(joined(3))
    assert link.wait_for_directive(2, timeout_s=60) == joined(3)
    assert not let_go.is_set()
    link.abort_on_loss(2, let_go.set, forming=True)
    assert let_go.wait(60)


def test_it_beats_and_tells_what_it_waits_for(line: Line) -> None:
    """And how often it has moved a piece of the state; by a thread of its own. It remembers that it failed."""
    link, agent = line
    words = agent.receive()
    assert next(words) == Heartbeat()
    link.waits_for(7)
    assert next(word for word in words if word != Heartbeat()) == Heartbeat(waits_for=7)
    link.note_progress()
    link.note_progress()
    assert next(word for word in words if isinstance(word, Heartbeat) and word.moves == 2) == Heartbeat(
        waits_for=7, moves=2
    )
    assert not link.failed
    link.send(ScriptFailed(reason="broken", final=True))
    assert link.failed


@pytest.mark.parametrize(
    "end", [socket.socket.close, lambda ours: ours.sendall(encode_message(Heartbeat()))], ids=["gone", "unlike"]
)
def test_without_its_agent_it_ends(ended: threading.Event, end: Callable[[socket.socket], object]) -> None:
    """Who trains without one would be a second training; what one of another version says is not understood."""
    ours, theirs = socket.socketpair()
    link = SocketAgentClient(theirs, lost=ended.set)
    assert not ended.wait(0.05)
    end(ours)
    assert ended.wait(60)
    ours.close()
    link.close()


def test_only_the_script_itself_has_an_agent() -> None:
    """A program that it starts, or that it is started by, is told so, and does not take any open file for the line."""
    with pytest.raises(SpecError, match="edl run"):
        links.connect_to_agent({links.AGENT_FD: ""})
    assert isinstance(links.connect_to_agent({}), StandaloneClient)


def test_what_scripts_are_told_that_know_of_one_generation_only_is_taken_back(line: Line) -> None:
    """The next generation has other ranks, and whoever joins it by itself asks its run for them."""
    link, agent = line
    environ = {"RANK": "1", "LR": "0.1"}
    link.remove_start_variables(environ)
    assert environ == {"RANK": "1", "LR": "0.1"}
    agent.send(StartScript(environ={"RANK": "1", "WORLD_SIZE": "2"}))
    link.wait_for_start()
    link.remove_start_variables(environ)
    assert environ == {"LR": "0.1"}


def test_alone_there_is_one_generation_above_the_checkpoints_until_sigterm() -> None:
    """SIGTERM means to leave with a checkpoint; it is handled, and nothing else happens."""
    link = StandaloneClient()
    link.send(WorkerReady(live=True, seen=4))
    wish = link.wait_for_directive(0)
    assert isinstance(wish, JoinGeneration)
    assert (wish.generation, wish.world_size) == (5, 1)
    assert link.directive(5) is None
    before = signal.getsignal(signal.SIGTERM)
    try:
        link.handle_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        assert link.directive(5) == Leave(reason="SIGTERM", checkpoint=True)
    finally:
        signal.signal(signal.SIGTERM, before)
