"""The records of the shard ledger: shards, its state in a checkpoint, reports, and read positions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from edl_runtime.errors import SpecError


class ShardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a ledger goes through its shards.

    - `epochs`: how many; each starts when all shards of the one before are finished.
    - `shuffle`: whether each epoch has its own order, by `seed`. A stream can't be shuffled.
    - `failure_limit`: after so many failures in an epoch a shard is set aside for the rest of it.
    """

    epochs: int = 1
    seed: int = 0
    shuffle: bool = False
    failure_limit: int = 3

    def __post_init__(self) -> None:
        for field, least in (("epochs", 1), ("seed", 0), ("failure_limit", 1)):
            if getattr(self, field) < least:
                raise SpecError(field, getattr(self, field), f"{least} or more")


class Shard(msgspec.Struct, frozen=True):
    """A leased piece of the data: `name` in `epoch`, from record number `start` on.

    `ticket` identifies the shard and epoch; it stays the same when the shard is leased again.
    """

    ticket: int
    name: str
    epoch: int
    start: int = 0


class ShardFailure(msgspec.Struct, frozen=True):
    """The reason of each failure of a shard, and how many of its records are in the model."""

    reasons: tuple[str, ...]
    offset: int = 0


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a ledger in a checkpoint.

    Tickets below `next` are done unless they are `pending` (ticket, next record) or `dropped`. `names` are the numbers
    and names of a stream's unfinished shards, `failures` the tickets and failures. `digest` identifies the list and its
    shuffling, "" for a stream. `step` is the checkpoint's.
    """

    step: int = 0
    digest: str = ""
    added: int = 0
    closed: bool = False
    epoch: int = 0
    next: int = 0
    dropped: int = 0
    pending: tuple[tuple[int, int], ...] = ()
    failures: tuple[tuple[int, ShardFailure], ...] = ()
    names: tuple[tuple[int, str], ...] = ()


class SetAside(msgspec.Struct, frozen=True):
    """A shard that failed too often: only its first `offset` records count in this epoch."""

    shard: str
    epoch: int
    offset: int
    reasons: tuple[str, ...]


class LedgerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of shards of all epochs by state; future ones of an open stream are not counted.

    `acked` are in the model, `done` are in a checkpoint too; `committed` is the step of the last one.
    """

    generation: int
    epoch: int
    epochs: int
    added: int
    closed: bool
    committed: int
    todo: int
    doing: int
    acked: int
    done: int
    set_aside: tuple[SetAside, ...]


def digest_of(shards: Sequence[str] | None, plan: ShardPlan) -> str:
    """Return the same digest for workers whose tickets mean the same shards; "" for a stream."""
    if shards is None:
        return ""
    content = msgspec.json.encode([list(shards), plan.seed if plan.shuffle else None])
    return hashlib.sha256(content).hexdigest()[:16]


# Read positions of all ranks as a vector for an all-reduce (sum): two numbers for each rank, zeros elsewhere.


class ReadPosition(msgspec.Struct, frozen=True):
    """A rank's current shard, and how many of its records are applied after the step."""

    ticket: int
    offset: int


def to_vector(position: ReadPosition | None, rank: int, world_size: int) -> list[int]:
    """Return this rank's vector. `position` is None before its first shard."""
    vector = [0] * (2 * world_size)
    if position is not None:
        vector[2 * rank : 2 * rank + 2] = [position.ticket + 1, position.offset]
    return vector


def from_vector(vector: Sequence[int]) -> dict[int, int]:
    """Return from the sum how many records of each ticket are applied, for `commit` and `release`."""
    applied: dict[int, int] = {}
    for marked, offset in zip(vector[::2], vector[1::2], strict=True):
        if marked:
            applied[marked - 1] = max(offset, applied.get(marked - 1, 0))
    return applied


def has_conflict(vector: Sequence[int]) -> bool:
    """Whether two ranks are at the same shard, so that one of them has no lease of it."""
    marks = [mark for mark in vector[::2] if mark]
    return len(set(marks)) < len(marks)
