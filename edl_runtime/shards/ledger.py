"""The ledger of file shards and streams in Redis: which worker reads which shard, and which records are in the model.

A worker leases shards, and acknowledges each with the step that applied its last record. A checkpoint holds the
ledger's state of its step, so model and ledger are restored together. Only workers of the current generation may change
the ledger. Each record is then in the surviving model exactly once an epoch, if the caller follows three rules:

- Acknowledge a shard after the step that applied its last record, and before any rank starts on the next one.
- Call `commit` between two steps, on one rank, with what all ranks had applied after the first.
- After a change of the group, call `release` (the model was kept) or `restore` (it was loaded) before the next step.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.parsing import JsonDecoder
from edl_runtime.shards.blocking import WAIT_S, Blocking, blocking
from edl_runtime.shards.errors import (
    LeaseLostError,
    LedgerMissingError,
    ShardsChangedError,
    StaleGenerationError,
    StreamError,
)
from edl_runtime.store import keys
from edl_runtime.store.redis_client import malformed_if_unreadable, run_script, unavailable_if_lost

if TYPE_CHECKING:
    import numpy as np
    from redis.asyncio import Redis

MAX_SHARDS_PER_CALL = 1000
"""Shards in one call to Redis, so that it does not block other clients."""
MAX_REASON_LENGTH = 500

RETRY_HOLD_S = 1.0
MAX_RETRY_HOLD_S = 30.0
"""How long a process keeps a shard that it can't read before others may try it, doubled with each further one in a row:
the storage may be at fault, and recover."""


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


ONE_EPOCH = ShardPlan()


class Ledger:
    """A job's ledger, as one worker uses it. Every method raises RegistryUnavailableError and may then be repeated.

    `shards` is the same list for all workers; None for a stream, whose shards are given to `add`. `worker` is a name
    that no other process ever has. `generation` is 0 until `begin` or `restore`. `of` is "tasks" for `TaskQueue`.

    Methods that change the ledger raise StaleGenerationError when it belongs to another generation, and
    LedgerMissingError when Redis has lost a part of it, or may have: from each restart or failover of Redis to the next
    `restore`. `add` works all the same. Raises SpecError for a shuffled stream.
    """

    def __init__(
        self,
        client: Redis,
        namespace: str,
        job: str,
        *,
        worker: str,
        shards: Sequence[str] | None = None,
        plan: ShardPlan = ONE_EPOCH,
        of: keys.LedgerOf = "ledger",
    ) -> None:
        if shards is None and plan.shuffle:
            raise SpecError("shuffle", True, "False for a stream")
        self.generation = 0
        self._client = client
        self._job = job
        self._keys = keys.ledger_keys(namespace, job, of)
        self._worker = worker
        self._shards = shards
        self._plan = plan
        self._digest = digest_of(shards, plan)
        self._leasing = asyncio.Lock()
        self._call = secrets.randbits(40)

    async def begin(self, generation: int, *, after: int = 0) -> set[int]:
        """Start a generation: earlier ones can't change the ledger any more. Leases are kept.

        Each worker of the generation may call it. `after` is a generation that has begun, perhaps this one: a ledger
        without it is that of a master which Sentinel has replaced, and counts as lost. Returns the tickets that this
        worker still holds.
        """
        held = await self._run("ledger_begin", generation, self._worker, after)
        self.generation = generation
        with malformed_if_unreadable(self._keys[1]):
            return {int(ticket) for ticket in held}

    async def restore(self, state: LedgerState | None, generation: int) -> None:
        """Start a generation with the ledger of a checkpoint, or with a new one for None. Ends all leases.

        One worker calls it before any worker leases a shard. Redis may be empty. Shards that were added to a stream
        since the checkpoint stay, and a new ledger of a stream starts at its first shard. Raises ShardsChangedError for
        the state of other shards.
        """
        to = state or LedgerState(digest=self._digest, added=len(self._shards or ()), closed=self._shards is not None)
        if to.digest != self._digest:
            raise ShardsChangedError(to.added, len(self._shards or ()))
        content = msgspec.json.encode(to).decode()
        limits = self._plan.epochs, self._plan.failure_limit
        await self._run("ledger_restore", generation, *limits, int(state is None), content)
        self.generation = generation

    async def lease(self, most: int = 1) -> list[Shard] | None:
        """Lease up to `most` (1 to 1000) shards, to be read from their `start` on.

        Returns [] if none is free now: other workers hold the rest of the epoch, or the stream is still open. Returns
        None if all epochs are finished; only `release` or `restore` may bring shards back.
        """
        if not 1 <= most <= MAX_SHARDS_PER_CALL:
            raise SpecError("most", most, f"1 to {MAX_SHARDS_PER_CALL}")
        async with self._leasing:
            answer = await self._run("ledger_lease", self.generation, self._worker, most, self._call)
            more, added, closed, tickets = answer
            with malformed_if_unreadable(self._keys[6]):
                leased = pairs([int(number) for number in tickets.split()])
            places = [self._place(ticket, added if closed else None) for ticket, _ in leased]
            names = await self._names({number for _, number in places})
            self._call += 1  # only now is it certain that this answer is not needed again
        if not leased:
            return [] if more else None
        return [
            Shard(ticket, names[number], epoch, start)
            for (ticket, start), (epoch, number) in zip(leased, places, strict=True)
        ]

    async def ack(self, shards: Collection[Shard], step: int) -> None:
        """Record that `step` applied the last record of these shards: of up to 1000 all, or none if it raises.

        Raises LeaseLostError for a shard that this worker does not hold.
        """
        for some in slices(list(shards)):
            tickets = " ".join([f"{shard.ticket} {shard.start}" for shard in some])
            await self._run("ledger_ack", self.generation, self._worker, step, tickets)

    async def fail(self, shard: Shard, reason: str, *, applied: int = 0) -> bool:
        """Return a shard that can't be read; the next worker continues after its `applied` records.

        Returns whether the shard has now failed too often and is set aside.
        """
        offset = max(applied, shard.start)
        (count,) = await self._run(
            "ledger_fail", self.generation, self._worker, shard.ticket, offset, reason[:MAX_REASON_LENGTH]
        )
        return bool(count >= self._plan.failure_limit)

    async def release(self, step: int, positions: Mapping[int, int], alive: Collection[str]) -> int:
        """Take back the shards of workers that are not `alive`, and those finished after `step`; return how many.

        `step` is the last one of the surviving model, and `positions` how many records of each ticket it has.
        """
        (count,) = await self._run("ledger_release", self.generation, step, len(alive), *alive, *_flat(positions))
        return int(count)

    async def commit(self, step: int, positions: Mapping[int, int]) -> LedgerState:
        """Return the state for the checkpoint of `step`, and mark the shards finished in it as done.

        `positions` holds how many records of each ticket are applied after that step.
        """
        answer = await self._run("ledger_commit", self.generation, step, *_flat(positions))
        added, closed, epoch, following, dropped, failures, pending = answer
        state = LedgerState(
            step=step,
            digest=self._digest,
            added=added,
            closed=bool(closed),
            epoch=epoch,
            next=following,
            dropped=dropped,
            pending=tuple(sorted((int(ticket), int(offset)) for ticket, offset in pairs(pending))),
            failures=tuple(failures_in(self._keys[4], failures).items()),
        )
        if self._shards is not None:
            return state
        return msgspec.structs.replace(state, names=tuple((await self._names(self._needed(state))).items()))

    async def add(self, shards: Sequence[str], *, first: int) -> None:
        """Append shards to a stream; `first` is the number of the first one, counted from 0.

        Shards that the stream already has are skipped, so a producer may add them again. Any process may call it, also
        before the training starts. Raises StreamError.
        """
        for some in slices(list(shards)):
            await self._run("ledger_add", first, *some)
            first += len(some)

    async def close_stream(self) -> None:
        """Mark a stream as complete."""
        await self._run("ledger_close")

    async def report(self) -> LedgerReport:
        """Count the shards by state. Raises LedgerMissingError."""
        answer = await self._run("ledger_report")
        generation, added, closed, epochs, epoch, following, dropped, limit, committed, *counts, failures = answer
        doing, back, acked = counts
        aside = {
            ticket: one for ticket, one in failures_in(self._keys[4], failures).items() if len(one.reasons) >= limit
        }
        places = {ticket: self._place(ticket, added if closed else None) for ticket in aside}
        names = await self._names({number for _, number in places.values()})
        return LedgerReport(
            generation=generation,
            epoch=epoch,
            epochs=epochs,
            added=added,
            closed=bool(closed),
            committed=committed,
            todo=added * (epochs if closed else 1) - following + back,
            doing=doing,
            acked=acked,
            done=following - back - doing - acked - dropped,
            set_aside=tuple(
                SetAside(names[number], epoch, aside[ticket].offset, aside[ticket].reasons)
                for ticket, (epoch, number) in sorted(places.items())
            ),
        )

    def _place(self, ticket: int, added: int | None) -> tuple[int, int]:
        """Return epoch and number of a ticket's shard. `added` is None while the stream is open, in its first epoch."""
        if added is None:
            return 0, ticket
        epoch, place = divmod(ticket, added)
        if not self._plan.shuffle:
            return epoch, place
        return epoch, int(order(self._plan.seed, epoch, added)[place])

    def _needed(self, state: LedgerState) -> set[int]:
        """Return the numbers of a stream's shards that are not finished in this state."""
        if state.epoch + 1 < self._plan.epochs:
            return set(range(state.added))
        added = state.added if state.closed else None
        tickets = [*(ticket for ticket, _ in state.pending), *range(state.next, (state.epoch + 1) * state.added)]
        return {self._place(ticket, added)[1] for ticket in [*tickets, *dict(state.failures)]}

    async def _names(self, numbers: Collection[int]) -> dict[int, str]:
        if self._shards is not None:
            return {number: self._shards[number] for number in numbers}
        names: dict[int, str] = {}
        for some in slices(sorted(numbers)):
            with unavailable_if_lost(self._client, self._keys[5]):
                found = await self._client.hmget(self._keys[5], [str(number) for number in some])
            if None in found:  # lost since the script answered
                raise LedgerMissingError(self._job)
            names |= dict(zip(some, found, strict=True))
        return names

    async def _run(self, script: str, *args: str | int) -> list[Any]:
        answer: list[Any]
        status, *answer = await run_script(self._client, script, self._keys, args)
        match status:
            case "missing":
                raise LedgerMissingError(self._job)
            case "stale":
                raise StaleGenerationError(self._job, int(args[0]), answer[0])
            case "lost":
                raise LeaseLostError(self._job, self._worker, int(answer[0]))
            case "gap":
                raise StreamError(self._job, f"it has {answer[0]}, so number {int(args[0]) - 1} is missing")
            case "differs":
                raise StreamError(self._job, f"number {answer[0]} is another shard")
            case "closed":
                raise StreamError(self._job, f"it was closed with {answer[0]}")
        return answer


@functools.lru_cache(maxsize=2)  # for the current epoch and the next
def order(seed: int, epoch: int, length: int, *, shuffle: bool = True) -> np.ndarray:
    """Return the order of an epoch's `length` samples; read-only.

    Must be the same on every machine and with every numpy, for the sake of checkpoints. numpy guarantees that for its
    bit generators, but not for `permutation`.
    """
    import numpy as np

    indices = np.arange(length, dtype=np.int64)
    if shuffle:
        draws = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(length)
        indices = np.argsort(draws, kind="stable").astype(np.int64, copy=False)
    indices.flags.writeable = False
    return indices


def digest_of(shards: Sequence[str] | None, plan: ShardPlan) -> str:
    """Return the same digest for workers whose tickets mean the same shards; "" for a stream."""
    if shards is None:
        return ""
    content = msgspec.json.encode([list(shards), plan.seed if plan.shuffle else None])
    return hashlib.sha256(content).hexdigest()[:16]


def slices(items: list[Any]) -> list[list[Any]]:
    """Return the items in lists of as many as one call to Redis takes."""
    return [items[start : start + MAX_SHARDS_PER_CALL] for start in range(0, len(items), MAX_SHARDS_PER_CALL)]


def failures_in(key: str, flat: Sequence[str]) -> dict[int, ShardFailure]:
    """Return the failures in a script's answer by ticket. Raises MalformedRecordError, which names the key."""
    with malformed_if_unreadable(key):
        return {int(ticket): JsonDecoder(ShardFailure).decode(record) for ticket, record in pairs(flat)}


def pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return [(a, b), (c, d)] of [a, b, c, d]."""
    return list(zip(flat[::2], flat[1::2], strict=True))


def _flat(positions: Mapping[int, int]) -> list[int]:
    return [number for pair in positions.items() for number in pair]


class BlockingLedger(Blocking[Ledger]):
    """`Ledger`'s methods without `await`, for any thread; see `Blocking`. Raises SpecError as `Ledger` does."""

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        job: str,
        *,
        worker: str,
        shards: Sequence[str] | None = None,
        plan: ShardPlan = ONE_EPOCH,
        wait_s: float = WAIT_S,
    ) -> None:
        def make(client: Redis) -> Ledger:
            return Ledger(client, namespace, job, worker=worker, shards=shards, plan=plan)

        super().__init__(redis_url, job, worker, make, wait_s=wait_s)

    begin = blocking(Ledger.begin)
    restore = blocking(Ledger.restore)
    lease = blocking(Ledger.lease)
    ack = blocking(Ledger.ack)
    fail = blocking(Ledger.fail)
    release = blocking(Ledger.release)
    commit = blocking(Ledger.commit)
    add = blocking(Ledger.add)
    close_stream = blocking(Ledger.close_stream)
    report = blocking(Ledger.report)
