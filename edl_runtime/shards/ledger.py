"""The fenced ledger of file shards and streams: who reads what, and what is in the model, agreed on through Redis.

A worker leases shards, and acknowledges each with the step that applied its last record. A checkpoint holds the
ledger's state of its step, so that model and ledger go back together. Only workers of the current generation may
change anything. Then each record is in the surviving model exactly once an epoch, if the caller keeps three rules:

- A shard is acknowledged after the step that applied its last record, and before any rank's position moves on.
- `commit` is called between two steps, by one of the ranks, with what all of them had applied after the first.
- After a change of the group, `release` (the model stayed) or `restore` (it went back) comes before the next step.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.shards.cursor import order
from edl_runtime.shards.errors import (
    ForkedLedgerError,
    LeaseLostError,
    LedgerMissingError,
    ShardsChangedError,
    StaleGenerationError,
    StreamError,
)
from edl_runtime.shards.ledger_state import (
    LedgerReport,
    LedgerState,
    SetAside,
    Shard,
    ShardFailure,
    ShardPlan,
    digest_of,
)
from edl_runtime.store import keys
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect, malformed_if_unreadable, run_script, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

MAX_SHARDS_PER_CALL = 1000
"""Shards in one call to Redis, so that nobody else waits for it."""
MAX_REASON_LENGTH = 500

ONE_EPOCH = ShardPlan()


class Ledger:
    """One worker's hand on a job's ledger. Every method raises RegistryUnavailableError, and may be called again then.

    `shards` is the list, the same one for all workers; None for a stream, whose shards come with `add`. `worker` is a
    name that no other process ever has, and `generation` the one that it acts for: 0 until `begin` or `restore`.

    What changes the ledger raises StaleGenerationError when it is another generation's, and LedgerMissingError when
    Redis has forgotten it or a part of it, or may have forgotten what happened last: from each restart of Redis, and
    each failover, to the next `restore`. A stream grows all the same. Raises SpecError for a stream that is to be
    shuffled.
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
    ) -> None:
        if shards is None and plan.shuffle:
            raise SpecError("shuffle", True, "False for a stream, whose shards are not known beforehand")
        self.generation = 0
        self._client = client
        self._job = job
        self._keys = keys.ledger_keys(namespace, job)
        self._names_key = keys.ledger_names(namespace, job)
        self._worker = worker
        self._shards = shards
        self._plan = plan
        self._digest = digest_of(shards, plan)
        self._leasing = asyncio.Lock()
        self._call = secrets.randbits(40)

    async def begin(self, generation: int) -> set[int]:
        """Act for this generation from now on; those before it can't any more. Leases stay as they are.

        Each of its workers may call it, and is told the tickets that it holds: those of a worker that a generation has
        gone on without may be others' by now.
        """
        held = await self._run("ledger_begin", generation, self._worker)
        self.generation = generation
        with malformed_if_unreadable(self._keys[1]):
            return {int(ticket) for ticket in held}

    async def restore(self, state: LedgerState | None, generation: int) -> None:
        """Begin a generation with the ledger of a checkpoint, or for None with a new one: nothing is leased.

        One worker calls it before any other leases something. Redis may have forgotten everything. Shards that were
        added to a stream since the checkpoint stay, and a new ledger of a stream starts with the first that was ever
        added. Raises ShardsChangedError for the state of other shards.
        """
        to = state or LedgerState(digest=self._digest, added=len(self._shards or ()), closed=self._shards is not None)
        if to.digest != self._digest:
            raise ShardsChangedError(to.added, len(self._shards or ()))
        content = msgspec.json.encode(to).decode()
        limits = self._plan.epochs, self._plan.failure_limit
        await self._run("ledger_restore", generation, *limits, int(state is None), content)
        self.generation = generation

    async def lease(self, most: int = 1) -> list[Shard] | None:
        """Return up to `most` (1 to 1000) shards that are this worker's now, to be read from their `start` on.

        [] says that there is none now: others hold the rest of the epoch and may lose it, or the stream is still open.
        None says that all of the last epoch are finished; only a `release` or `restore` brings some back.
        """
        if not 1 <= most <= MAX_SHARDS_PER_CALL:
            raise SpecError("most", most, f"1 to {MAX_SHARDS_PER_CALL}")
        async with self._leasing:
            answer = await self._run("ledger_lease", self.generation, self._worker, most, self._call)
            more, added, closed, tickets = answer
            with malformed_if_unreadable(self._keys[6]):
                leased = _pairs([int(number) for number in tickets.split()])
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
        """Say that `step` applied the last record of these shards; of all of up to 1000 or, when it raises, of none.

        Raises LeaseLostError for one that is not this worker's.
        """
        for some in _slices(list(shards)):
            tickets = " ".join([f"{shard.ticket} {shard.start}" for shard in some])
            await self._run("ledger_ack", self.generation, self._worker, step, tickets)

    async def fail(self, shard: Shard, reason: str, *, applied: int = 0) -> bool:
        """Give back a shard that can't be read, of which `applied` records are in the model.

        Whoever leases it next starts there. Returns whether this was one failure too many: then it is set aside.
        """
        offset = max(applied, shard.start)
        (count,) = await self._run(
            "ledger_fail", self.generation, self._worker, shard.ticket, offset, reason[:MAX_REASON_LENGTH]
        )
        return bool(count >= self._plan.failure_limit)

    async def release(self, step: int, positions: Mapping[int, int], alive: Iterable[str], *, failed: str = "") -> int:
        """Take back what workers held that are not `alive`, and what steps after `step` finished; return how many.

        `step` is the last one of the model that survived, and `positions` what was applied of which ticket after it.
        With a reason in `failed` this counts as a failure of all that the dead held.
        """
        workers = list(alive)
        arguments: list[str | int] = [step, failed[:MAX_REASON_LENGTH], len(workers), *workers, *_flat(positions)]
        (count,) = await self._run("ledger_release", self.generation, *arguments)
        return int(count)

    async def commit(self, step: int, positions: Mapping[int, int]) -> LedgerState:
        """Return what the checkpoint of `step` has to hold, and take for done what is finished in it.

        `positions` tells what was applied of which ticket after that step.
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
            pending=tuple(sorted((int(ticket), int(offset)) for ticket, offset in _pairs(pending))),
            failures=tuple(self._failures(failures).items()),
        )
        if self._shards is not None:
            return state
        return msgspec.structs.replace(state, names=tuple((await self._names(self._needed(state))).items()))

    async def add(self, shards: Sequence[str], *, first: int) -> None:
        """Append to a stream the shards that have the numbers from `first` on, counted from 0.

        Those that it has are passed over, so a producer that does not know how far it was adds them again. Any process
        may do so, also before the training starts. Raises StreamError.
        """
        for some in _slices(list(shards)):
            await self._run("ledger_add", first, *some)
            first += len(some)

    async def close_stream(self) -> None:
        """Say that all shards of a stream are added."""
        await self._run("ledger_close")

    async def report(self) -> LedgerReport:
        """Return what is where. Raises LedgerMissingError."""
        answer = await self._run("ledger_report")
        generation, added, closed, epochs, epoch, following, dropped, limit, committed, *counts, failures = answer
        doing, back, acked = counts
        aside = {ticket: one for ticket, one in self._failures(failures).items() if len(one.reasons) >= limit}
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
        """Return the numbers of a stream's shards that are still to be read after this state."""
        if state.epoch + 1 < self._plan.epochs:
            return set(range(state.added))
        added = state.added if state.closed else None
        tickets = [*(ticket for ticket, _ in state.pending), *range(state.next, (state.epoch + 1) * state.added)]
        return {self._place(ticket, added)[1] for ticket in [*tickets, *dict(state.failures)]}

    async def _names(self, numbers: Collection[int]) -> dict[int, str]:
        if self._shards is not None:
            return {number: self._shards[number] for number in numbers}
        names: dict[int, str] = {}
        for some in _slices(sorted(numbers)):
            with unavailable_if_lost(self._client):
                found = await self._client.hmget(self._names_key, [str(number) for number in some])
            if None in found:  # since the answer that told of them
                raise LedgerMissingError(self._job)
            names |= dict(zip(some, found, strict=True))
        return names

    def _failures(self, flat: Sequence[str]) -> dict[int, ShardFailure]:
        with malformed_if_unreadable(self._keys[4]):
            return {int(ticket): JsonDecoder(ShardFailure).decode(record) for ticket, record in _pairs(flat)}

    async def _run(self, script: str, *args: str | int) -> list[Any]:
        answer: list[Any]
        said, *answer = await run_script(self._client, script, self._keys, args)
        match said:
            case "missing":
                raise LedgerMissingError(self._job)
            case "stale":
                raise StaleGenerationError(self._job, int(args[0]), answer[0])
            case "lost":
                raise LeaseLostError(self._job, self._worker, int(answer[0]))
            case "gap":
                raise StreamError(
                    self._job, f"it has {answer[0]}, and those up to number {int(args[0]) - 1} come first"
                )
            case "differs":
                raise StreamError(self._job, f"number {answer[0]} is another one already")
            case "closed":
                raise StreamError(self._job, f"it was closed with {answer[0]}")
        return answer


def _slices(items: list[Any]) -> list[list[Any]]:
    return [items[start : start + MAX_SHARDS_PER_CALL] for start in range(0, len(items), MAX_SHARDS_PER_CALL)]


def _pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _flat(positions: Mapping[int, int]) -> list[int]:
    return [number for pair in positions.items() for number in pair]


# A ledger for a training script, which knows nothing of asyncio: each call waits for its answer, and for Redis.

RETRY_EVERY_S = 0.25

Answer = TypeVar("Answer")

log = get_logger(__name__)


class BlockingLedger:
    """`Ledger`'s methods without `await`, for any thread. A context manager; `close` ends its own thread.

    While Redis is away a call tries again for up to `wait_s`, then raises RegistryUnavailableError: whatever is done
    twice by that counts once. Raises SpecError as `Ledger` and `connect` do, and
    ForkedLedgerError in a process that was forked from the one that made it.
    """

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        job: str,
        *,
        worker: str,
        shards: Sequence[str] | None = None,
        plan: ShardPlan = ONE_EPOCH,
        wait_s: float = 60.0,
    ) -> None:
        self.job = job
        self._worker = worker
        self._process = os.getpid()
        self._wait_s = wait_s
        self._client = connect(redis_url)
        self._ledger = Ledger(self._client, namespace, job, worker=worker, shards=shards, plan=plan)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="edl ledger", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def generation(self) -> int:
        return self._ledger.generation

    def begin(self, generation: int) -> set[int]:
        return self._call("begin a generation", lambda: self._ledger.begin(generation))

    def restore(self, state: LedgerState | None, generation: int) -> None:
        self._call("restore the ledger", lambda: self._ledger.restore(state, generation))

    def lease(self, most: int = 1) -> list[Shard] | None:
        return self._call("lease shards", lambda: self._ledger.lease(most))

    def ack(self, shards: Collection[Shard], step: int) -> None:
        self._call("acknowledge shards", lambda: self._ledger.ack(shards, step))

    def fail(self, shard: Shard, reason: str, *, applied: int = 0) -> bool:
        return self._call("give back a shard", lambda: self._ledger.fail(shard, reason, applied=applied))

    def release(self, step: int, positions: Mapping[int, int], alive: Iterable[str], *, failed: str = "") -> int:
        workers = list(alive)
        return self._call("take back shards", lambda: self._ledger.release(step, positions, workers, failed=failed))

    def commit(self, step: int, positions: Mapping[int, int]) -> LedgerState:
        return self._call("commit a step", lambda: self._ledger.commit(step, positions))

    def add(self, shards: Sequence[str], *, first: int) -> None:
        self._call("add shards", lambda: self._ledger.add(shards, first=first))

    def close_stream(self) -> None:
        self._call("close a stream", self._ledger.close_stream)

    def report(self) -> LedgerReport:
        return self._call("read the ledger", self._ledger.report)

    def close(self) -> None:
        """Let go of Redis and end the thread; may be called again. No other method works afterwards.

        In a forked child it does nothing: both are its parent's.
        """
        if self._loop.is_closed() or os.getpid() != self._process:
            return
        asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, what: str, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        if os.getpid() != self._process:
            raise ForkedLedgerError(self.job, self._worker)
        return asyncio.run_coroutine_threadsafe(self._persist(what, ask), self._loop).result()

    async def _persist(self, what: str, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        give_up_at = time.monotonic() + self._wait_s
        away = False
        while True:
            try:
                answer = await ask()
            except RegistryUnavailableError as error:
                if time.monotonic() + RETRY_EVERY_S > give_up_at:
                    raise
                if not away:
                    log.warning("ledger.waits", job=self.job, to=what, address=error.address, cause=error.cause)
                away = True
                await asyncio.sleep(RETRY_EVERY_S)
            else:
                if away:
                    log.info("ledger.goes_on", job=self.job)
                return answer
