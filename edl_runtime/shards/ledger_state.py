"""The records of the shard ledger: what it leases, what a checkpoint holds of it, its reports, and read positions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from edl_runtime.errors import SpecError


class ShardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a ledger goes through its shards.

    - `epochs`: how often, one after the other; the next starts when each shard of the one before is finished.
    - `shuffle`: in an order of each epoch's own, by `seed`. A stream can't be shuffled.
    - `failure_limit`: a shard that failed so often in an epoch is set aside for the rest of it.
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
    """A piece of the data that a worker has leased: `name` in `epoch`, from record number `start` on.

    `ticket` is another for each shard and epoch, and the same each time that this one is leased.
    """

    ticket: int
    name: str
    epoch: int
    start: int = 0


class ShardFailure(msgspec.Struct, frozen=True):
    """Why a shard failed, once for each time, and how many of its records are in the model."""

    reasons: tuple[str, ...]
    offset: int = 0


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds of a ledger; JSON of it is a few bytes for each shard in hand, and for each failed one.

    Tickets below `next` are done unless they are `pending`, at the record with which to go on, or `dropped`. `names`
    are those of a stream's shards that are still to come, each after its number, and `failures` come after their
    tickets. `digest` says which list and shuffling it is of, "" for a stream. `step` is the checkpoint's.
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
    """Shards of all epochs by where they are; those to come of an open stream are not counted.

    `acked` are in the model, and `done` also in a checkpoint, the last of which is `committed` (a step).
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
    """Return what two workers have in common that mean the same shard by the same ticket; "" for a stream."""
    if shards is None:
        return ""
    content = msgspec.json.encode([list(shards), plan.seed if plan.shuffle else None])
    return hashlib.sha256(content).hexdigest()[:16]


# How far each rank is, as whole numbers that ride in an all-reduce that sums: two places a rank, zeros elsewhere.


class ReadPosition(msgspec.Struct, frozen=True):
    """The shard that a rank is at, and how many of its records are applied after the step."""

    ticket: int
    offset: int


def to_vector(position: ReadPosition | None, rank: int, world_size: int) -> list[int]:
    """Return this rank's share of the sum. None: it has not begun a shard."""
    vector = [0] * (2 * world_size)
    if position is not None:
        vector[2 * rank : 2 * rank + 2] = [position.ticket + 1, position.offset]
    return vector


def from_vector(vector: Sequence[int]) -> dict[int, int]:
    """Return of the sum over all ranks how much of each ticket is applied, as `commit` and `release` take it."""
    applied: dict[int, int] = {}
    for marked, offset in zip(vector[::2], vector[1::2], strict=True):
        if marked:
            applied[marked - 1] = max(offset, applied.get(marked - 1, 0))
    return applied


def has_conflict(vector: Sequence[int]) -> bool:
    """Return of the sum over all ranks whether two are at one shard: then one of them has it without a lease."""
    marks = [mark for mark in vector[::2] if mark]
    return len(set(marks)) < len(marks)
