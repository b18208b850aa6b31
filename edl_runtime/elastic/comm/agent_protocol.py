"""Messages between an instance's agent and its worker process, over one socket pair.

Each is its length in four bytes, then JSON.
"""

from __future__ import annotations

import socket
import struct
import threading
import traceback
from collections.abc import Iterator
from typing import Generic, Literal, Self, TypeVar, get_args

import msgspec

from edl_runtime.errors import EdlError
from edl_runtime.parsing import JsonDecoder

Gear = Literal["live", "warm", "cold"]
"""How a generation is entered: by the running process, by a standby that has imported everything, or by a new one."""

GEARS: tuple[Gear, ...] = get_args(Gear)
"""The fastest first."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=lambda name: name.lower()):
    pass


class StartScript(_Message, frozen=True, kw_only=True):
    """To a standby: set these environment variables and run the script."""

    environ: dict[str, str]


class JoinGeneration(_Message, frozen=True, kw_only=True):
    """To a trainer: be this rank of this generation; from the next step's end, if it is in one already.

    - `store`: "host:port" where rank 0 listens for the others.
    - `token`: by which they know each other there.
    - `instances`: most members that the job may come to have.
    """

    generation: int
    rank: int
    world_size: int
    store: str
    instances: int
    token: str = ""


class AbortGeneration(_Message, frozen=True, kw_only=True):
    """To a trainer: this generation has lost a member; let go of whatever waits for it."""

    generation: int


class Leave(_Message, frozen=True, kw_only=True):
    """To a trainer: end at the end of a step, all ranks at the same one. `checkpoint`: this one writes it."""

    reason: str
    checkpoint: bool


AgentMessage = StartScript | JoinGeneration | AbortGeneration | Leave


class StandbyLoaded(_Message, frozen=True, kw_only=True):
    """From a standby: all is imported, and the script can start."""


class InitCalled(_Message, frozen=True, kw_only=True):
    """From a trainer: its script has called `elastic.init`, so it joins generations by itself.

    `checkpoint`: where it keeps checkpoints, an absolute path or a URL; empty for none.
    """

    checkpoint: str = ""


class WorkerReady(_Message, frozen=True, kw_only=True):
    """From a trainer: the model is built, and it waits for its first generation.

    `live`: it can go from one generation to the next by itself. `seen`: the generation of the newest checkpoint.
    """

    live: bool
    seen: int = 0


class GenerationEntered(_Message, frozen=True, kw_only=True):
    """From a trainer: it is in the generation, with the state that all ranks have, and goes on from `step`.

    - `source`: where the state came from.
    - `live`: whether it can go on to another generation by itself.
    """

    generation: int
    step: int
    source: Literal["peer", "checkpoint", "start"]
    live: bool


class StepDone(_Message, frozen=True, kw_only=True):
    """From a trainer: it has finished a step, at this Unix time. A generation's first, then a few a second.

    - `clock_s`: the same moment by the monotonic clock, which is one for all processes of a machine.
    - `samples`: of all ranks so far. `total_steps`: of the whole training, None while unknown.
    """

    generation: int
    step: int
    at: float
    clock_s: float
    epoch: int
    samples: int
    total_steps: int | None = None
    loss: float | None = None


class Heartbeat(_Message, frozen=True, kw_only=True):
    """From a trainer, twice a second, by a thread of its own: its process is not stopped.

    - `waits_for`: the step at whose end, or before which, it waits for other ranks, None while it computes.
    - `moves`: how many pieces of state it has read, written, given or taken so far.
    """

    waits_for: int | None = None
    moves: int = 0


class GenerationLost(_Message, frozen=True, kw_only=True):
    """From a trainer: the generation's communication has failed.

    `step`: of the state that it has all the same, None if it has none.
    """

    generation: int
    reason: str
    step: int | None = None


class CheckpointSaved(_Message, frozen=True, kw_only=True):
    """From a trainer: a checkpoint is complete, since this Unix time."""

    generation: int
    step: int
    epoch: int
    url: str
    took_s: float
    created_at: float
    metrics: dict[str, float] = {}


class CheckpointDelayed(_Message, frozen=True, kw_only=True):
    """From a trainer: its last checkpoint can't be written; it keeps the weights and tries again, so long in all."""

    step: int
    reason: str
    for_s: float


class Note(_Message, frozen=True, kw_only=True):
    """From a trainer: something for the job's events, as a change of hyper-parameters."""

    text: str


class WorkerFinished(_Message, frozen=True, kw_only=True):
    """From a trainer: it has trained all there is ("done"), or has ended because it was told to ("left")."""

    step: int
    why: Literal["done", "left"]


class ScriptFailed(_Message, frozen=True, kw_only=True):
    """From a trainer: it can't go on, and why; the last before it ends. `final`: no other try would fare better."""

    reason: str
    final: bool

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return what is to be said of an error: wrong input is final."""
        said = "".join(traceback.format_exception_only(error)).strip()
        return cls(reason=said, final=isinstance(error, EdlError) and isinstance(error, ValueError))


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


# Messages over a socket between two processes of one machine: each its length in four bytes, then JSON.

MAX_MESSAGE_BYTES = 1 << 20
"""Bytes of a message, at most: environment variables are the most there is to say."""

_HEAD = struct.Struct("!I")

MessageT = TypeVar("MessageT")
"""The kinds of messages that arrive."""


def encode_message(message: msgspec.Struct) -> bytes:
    """Return the message as it travels. Raises ValueError above `LONGEST`."""
    body = msgspec.json.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes, allowed are {MAX_MESSAGE_BYTES}")
    return _HEAD.pack(len(body)) + body


class MessageDecoder(Generic[MessageT]):
    """Cuts what arrives into messages of the union `kinds`."""

    def __init__(self, kinds: object) -> None:
        self._decoder: JsonDecoder[MessageT] = JsonDecoder(kinds)
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[MessageT]:
        """Yield the messages that `data` completes. Raises msgspec.DecodeError for anything else, and nothing else."""
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


class MessageChannel(Generic[MessageT]):
    """A trainer's end: any thread may say something, one thread listens."""

    def __init__(self, end: socket.socket, kinds: object) -> None:
        self._end = end
        self._unpacker: MessageDecoder[MessageT] = MessageDecoder(kinds)
        self._saying = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises OSError when the other end is gone."""
        with self._saying:
            self._end.sendall(encode_message(message))

    def receive(self) -> Iterator[MessageT]:
        """Yield what the other end says, until it is gone."""
        while data := self._end.recv(1 << 16):
            yield from self._unpacker.feed(data)

    def close(self) -> None:
        self._end.close()
