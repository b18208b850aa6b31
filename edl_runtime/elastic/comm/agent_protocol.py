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
"""How a worker enters a generation: in the running process (live), in a standby that has imported everything (warm), in
a new process (cold)."""

GEARS: tuple[Gear, ...] = get_args(Gear)
"""Fastest first."""


CommBackend = Literal["gloo", "nccl"]
"""What the ranks of a group communicate by: NCCL where each has a GPU of its own, else gloo."""


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


class AbortGeneration(_Message, frozen=True, kw_only=True):
    """To a worker: this generation has lost a member; stop whatever waits for it."""

    generation: int


class Leave(_Message, frozen=True, kw_only=True):
    """To a worker: end after a step, all ranks after the same one. `checkpoint`: this worker writes it."""

    reason: str
    checkpoint: bool


AgentMessage = StartScript | JoinGeneration | AbortGeneration | Leave


class StandbyLoaded(_Message, frozen=True, kw_only=True):
    """From a standby: everything is imported, and the script can start."""


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
    """From a worker: a checkpoint is complete, since this Unix time."""

    generation: int
    step: int
    epoch: int
    url: str
    took_s: float
    created_at: float
    metrics: dict[str, float] = {}


class CheckpointDelayed(_Message, frozen=True, kw_only=True):
    """From a worker: its last checkpoint can't be written; it keeps the weights and retries for `for_s`."""

    step: int
    reason: str
    for_s: float


class Note(_Message, frozen=True, kw_only=True):
    """From a worker: text for the job's events, such as a change of the learning rate."""

    text: str


class WorkerFinished(_Message, frozen=True, kw_only=True):
    """From a worker: it has trained everything ("done"), or has ended because it was told to ("left")."""

    step: int
    why: Literal["done", "left"]


class ScriptFailed(_Message, frozen=True, kw_only=True):
    """From a worker, its last message: it can't continue, and why. `final`: a restart would fail in the same way."""

    reason: str
    final: bool

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return the message for an error: invalid input is final."""
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


class MessageChannel(Generic[MessageT]):
    """A worker's end of the socket: any thread may send, one thread receives."""

    def __init__(self, end: socket.socket, kinds: object) -> None:
        self._end = end
        self._unpacker: MessageDecoder[MessageT] = MessageDecoder(kinds)
        self._sending = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises OSError when the other end is gone."""
        with self._sending:
            self._end.sendall(encode_message(message))

    def receive(self) -> Iterator[MessageT]:
        """Yield messages until the other end is gone."""
        while data := self._end.recv(1 << 16):
            yield from self._unpacker.feed(data)

    def close(self) -> None:
        self._end.close()
