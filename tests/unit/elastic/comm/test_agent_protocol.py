"""The protocol between agent and worker: decoding, and the worker's client."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.elastic.fake_agent import AgentEnd

from edl_runtime.elastic.comm import agent_protocol
from edl_runtime.elastic.comm.agent_protocol import (
    MAX_MESSAGE_BYTES,
    AbortGeneration,
    AgentMessage,
    Heartbeat,
    JoinGeneration,
    Leave,
    MessageDecoder,
    ScriptFailed,
    SocketAgentClient,
    StandaloneClient,
    StartScript,
    WorkerMessage,
    WorkerReady,
    encode_message,
)
from edl_runtime.elastic.comm.bootstrap import Hello
from edl_runtime.errors import SpecError

HELLO = Hello(generation=1, rank=1, name="nameé", step=5, token="secret")
MESSAGES = [
    HELLO,
    StartScript(environ={"A": "b"}),
    Leave(reason="drained", checkpoint=True),
    JoinGeneration(generation=7, rank=0, world_size=2, store="127.0.0.1:1", instances=2),
]


def framed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


ODD = [b"\xff", b'"\\ud800"', b"9" * 5000, b"1e999", b"[" * 5000, b'{"a":' * 5000, b"NaN", b"null", b'"', b"{}"]
"""Pieces that JSON parsers are known to fail on."""


def mutated(draw: st.DrawFn) -> bytes:
    """Return a valid message in which a few pieces are replaced."""
    body = msgspec.json.encode(draw(st.sampled_from(MESSAGES)))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(body)))
        end = start + draw(st.integers(0, 8))
        body = body[:start] + draw(st.sampled_from(ODD) | st.binary(max_size=4)) + body[end:]
    return framed(body)


frames = st.composite(mutated)() | st.binary(max_size=64).map(framed) | st.binary(max_size=64)


@given(received=st.lists(frames, max_size=3).map(b"".join), kinds=st.sampled_from([Hello, WorkerMessage, AgentMessage]))
@example(received=framed(b'{"generation":1,"rank":1,"name":"\xff\xfe","step":null,"token":"w"}'), kinds=Hello)
@example(received=framed(b'{"generation":1,"of another version":' + b"[" * 5000), kinds=Hello)
@example(received=struct.pack("!I", MAX_MESSAGE_BYTES + 1), kinds=Hello)
@example(received=b"\xff" * 70, kinds=Hello)
def test_any_input_gives_messages_or_the_documented_error(received: bytes, kinds: object) -> None:
    """Any other error would end a worker, or its agent."""
    decoder: MessageDecoder[msgspec.Struct] = MessageDecoder(kinds)
    try:
        for message in decoder.feed(received):
            assert isinstance(message, msgspec.Struct)
    except msgspec.DecodeError:
        pass


@pytest.mark.parametrize("cut", [1, 3, 4, 20, -1])
def test_messages_are_whole_wherever_they_are_cut(cut: int) -> None:
    """A stream has no boundaries."""
    sent = encode_message(HELLO) * 2
    decoder: MessageDecoder[Hello] = MessageDecoder(Hello)
    assert [*decoder.feed(sent[:cut]), *decoder.feed(sent[cut:])] == [HELLO, HELLO]


Pair = tuple[SocketAgentClient, AgentEnd]


def joined(generation: int) -> JoinGeneration:
    return JoinGeneration(generation=generation, rank=0, world_size=1, store="", instances=4)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when the client would end the process."""
    monkeypatch.setattr(agent_protocol, "HEARTBEAT_EVERY_S", 0.01)
    return threading.Event()


@pytest.fixture
def pair(ended: threading.Event) -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    client = SocketAgentClient(theirs, lost=ended.set)
    yield client, AgentEnd(ours)
    ours.close()
    assert ended.wait(60)
    client.close()


def test_the_newest_generation_is_the_directive(pair: Pair) -> None:
    """An older one that comes late does not count, nor the one that the worker is in."""
    client, agent = pair
    assert client.directive(0) is None
    agent.send(StartScript(environ={"A": "b"}))
    agent.send(joined(3))
    agent.send(joined(2))
    assert client.wait_for_start().environ == {"A": "b"}
    assert client.wait_for_directive(0) == joined(3)
    assert client.directive(3) is None
    agent.send(joined(4))
    assert client.wait_for_directive(3) == joined(4)


def test_a_rank_votes_for_a_stop_and_insists_on_it_later(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may get no directive at all. One for another generation is none."""
    client, agent = pair
    monkeypatch.setattr(agent_protocol, "INSIST_AFTER_S", 3600.0)
    assert client.votes_to_stop(3, 4) == 0
    agent.send(joined(4))
    assert client.wait_for_directive(3) == joined(4)
    assert [client.votes_to_stop(generation, 4) for generation in (3, 4)] == [1, 0]
    monkeypatch.setattr(agent_protocol, "INSIST_AFTER_S", 0.0)
    assert [client.votes_to_stop(generation, 4) for generation in (3, 4)] == [4, 0]


def test_leave_comes_first_and_keeps_the_request_for_a_checkpoint(pair: Pair) -> None:
    """A later Leave without one does not cancel it."""
    client, agent = pair
    agent.send(Leave(reason="deadline", checkpoint=True))
    agent.send(Leave(reason="excluded", checkpoint=False))
    agent.send(joined(9))
    deadline = time.monotonic() + 60
    while client.wait_for_directive(0) != Leave(reason="excluded", checkpoint=True):
        assert time.monotonic() < deadline


def test_an_abort_is_for_its_generation_also_when_it_comes_first(pair: Pair) -> None:
    """It does not abort a later generation."""
    client, agent = pair
    aborted = threading.Event()
    client.abort_on_loss(2, aborted.set)
    agent.send(AbortGeneration(generation=1))
    agent.send(joined(2))
    client.wait_for_directive(1)
    assert not aborted.is_set()
    agent.send(AbortGeneration(generation=2))
    assert aborted.wait(60)
    late = threading.Event()
    client.abort_on_loss(2, late.set)
    assert late.is_set()
    later = threading.Event()
    client.abort_on_loss(3, later.set)
    assert not later.is_set()


def test_a_newer_generation_aborts_one_that_forms(pair: Pair) -> None:
    """Its last member may never come. A generation that is up continues until the end of a step."""
    client, agent = pair
    agent.send(joined(2))
    client.wait_for_directive(1)
    aborted = threading.Event()
    client.abort_on_loss(2, aborted.set, forming=True)
    assert not aborted.is_set()
    client.abort_on_loss(2, aborted.set)
    agent.send(joined(3))
    assert client.wait_for_directive(2) == joined(3)
    assert not aborted.is_set()
    client.abort_on_loss(2, aborted.set, forming=True)
    assert aborted.wait(60)


def test_heartbeats_have_what_it_waits_for_and_its_moves(pair: Pair) -> None:
    """A thread of its own sends them. The client remembers that it has sent a failure."""
    client, agent = pair
    messages = agent.receive()
    assert next(messages) == Heartbeat()
    client.waits_for(7)
    assert next(message for message in messages if message != Heartbeat()) == Heartbeat(waits_for=7)
    client.note_progress()
    client.note_progress()
    assert next(message for message in messages if isinstance(message, Heartbeat) and message.moves == 2) == Heartbeat(
        waits_for=7, moves=2
    )
    assert not client.failed
    client.send(ScriptFailed(reason="broken", final=True))
    assert client.failed


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ModuleNotFoundError("No module named 'nets'"), "import"),
        (IndentationError("unexpected indent"), "import"),
        (MemoryError(), "memory"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"), "memory"),
        (ValueError("lr"), ""),
    ],
)
def test_a_failure_has_its_cause(error: Exception, cause: str) -> None:
    """Where it matters for another try."""
    assert ScriptFailed.of(error).cause == cause


@pytest.mark.parametrize(
    "end",
    [socket.socket.close, lambda ours: ours.sendall(encode_message(Heartbeat()))],
    ids=["closed", "unknown message"],
)
def test_it_ends_without_its_agent(ended: threading.Event, end: Callable[[socket.socket], object]) -> None:
    """It would be a second training. A message of another version counts as the end of the agent."""
    ours, theirs = socket.socketpair()
    client = SocketAgentClient(theirs, lost=ended.set)
    assert not ended.wait(0.05)
    end(ours)
    assert ended.wait(60)
    ours.close()
    client.close()


def test_only_the_script_itself_has_an_agent() -> None:
    """A program that it starts gets an error that says so, and takes no open file for the socket."""
    with pytest.raises(SpecError, match="edl run"):
        agent_protocol.connect_to_agent({agent_protocol.AGENT_FD: ""})
    assert isinstance(agent_protocol.connect_to_agent({}), StandaloneClient)


def test_variables_of_one_generation_are_removed(pair: Pair) -> None:
    """The next generation has other ranks, and an elastic script asks its run for them."""
    client, agent = pair
    environ = {"RANK": "1", "LR": "0.1"}
    client.remove_start_variables(environ)
    assert environ == {"RANK": "1", "LR": "0.1"}
    agent.send(StartScript(environ={"RANK": "1", "WORLD_SIZE": "2"}))
    client.wait_for_start()
    client.remove_start_variables(environ)
    assert environ == {"LR": "0.1"}


def test_a_standalone_client_has_one_generation_above_the_checkpoints_until_sigterm() -> None:
    """SIGTERM means to leave with a checkpoint; it is handled, and nothing else happens."""
    client = StandaloneClient()
    client.send(WorkerReady(live=True, seen=4))
    directive = client.wait_for_directive(0)
    assert isinstance(directive, JoinGeneration)
    assert (directive.generation, directive.world_size) == (5, 1)
    assert client.directive(5) is None
    with pytest.raises(AssertionError, match="nobody to wait for"):
        client.wait_for_directive(5)
    before = signal.getsignal(signal.SIGTERM)
    try:
        client.handle_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        assert client.directive(5) == Leave(reason="SIGTERM", checkpoint=True)
    finally:
        signal.signal(signal.SIGTERM, before)
