"""What comes out of an `Unpacker`, whatever goes in."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edl_runtime.elastic.comm.agent_protocol import (
    MAX_MESSAGE_BYTES,
    AgentMessage,
    JoinGeneration,
    Leave,
    MessageDecoder,
    StartScript,
    WorkerMessage,
    encode_message,
)
from edl_runtime.elastic.comm.bootstrap import Hello

SAID = Hello(generation=1, rank=1, name="nameé", step=5, token="secret")
MESSAGES = [
    SAID,
    StartScript(environ={"A": "b"}),
    Leave(reason="drained", checkpoint=True),
    JoinGeneration(generation=7, rank=0, world_size=2, store="127.0.0.1:1", instances=2),
]


def framed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


ODD = [b"\xff", b'"\\ud800"', b"9" * 5000, b"1e999", b"[" * 5000, b'{"a":' * 5000, b"NaN", b"null", b'"', b"{}"]
"""Pieces of JSON, or nearly, that parsers are known to stumble over."""


def mutated(draw: st.DrawFn) -> bytes:
    """Return a message of ours in which a few pieces have others in their place."""
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
def test_whatever_arrives_is_messages_or_the_documented_error(received: bytes, kinds: object) -> None:
    """Who listens catches that one error: any other would end a trainer, or its agent, at a stranger's word."""
    unpacker: MessageDecoder[msgspec.Struct] = MessageDecoder(kinds)
    try:
        for message in unpacker.feed(received):
            assert isinstance(message, msgspec.Struct)
    except msgspec.DecodeError:
        pass


@pytest.mark.parametrize("cut", [1, 3, 4, 20, -1])
def test_messages_are_whole_wherever_they_are_cut(cut: int) -> None:
    """A stream keeps no boundaries."""
    sent = encode_message(SAID) * 2
    unpacker: MessageDecoder[Hello] = MessageDecoder(Hello)
    assert [*unpacker.feed(sent[:cut]), *unpacker.feed(sent[cut:])] == [SAID, SAID]
