"""The batches of one rank from shards that ranks lease: files, or a stream that grows while it is read."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from edl_runtime.elastic.comm.agent_protocol import Note
from edl_runtime.elastic.data.indexed import Collate, as_tensors
from edl_runtime.elastic.training.checkpointing import LINGER_S
from edl_runtime.elastic.training.loop import MicroBatch, TrainingLoop
from edl_runtime.log import get_logger
from edl_runtime.shards.errors import LeaseLostError, LedgerMissingError
from edl_runtime.shards.ledger import MAX_RETRY_HOLD_S, RETRY_HOLD_S, BlockingLedger, LedgerState, Shard

ReadShard = Callable[[str], Iterable[Any]]

IDLE_S = 0.02
"""How long all ranks pause when none has a shard and not all are finished: a stream may grow."""

SET_ASIDE = "shards_set_aside"
"""Metric of checkpoints and results: how many shards were given up; absent without any."""

log = get_logger(__name__)


def encode_position(position: tuple[int, int] | None, rank: int, world_size: int) -> list[int]:
    """Return what a rank adds to a sum over all ranks, so that each learns how far all are.

    `position`: its shard's ticket, and how many of its records are applied after the step; None before its first shard.
    """
    vector = [0] * (2 * world_size)
    if position is not None:
        ticket, offset = position
        vector[2 * rank : 2 * rank + 2] = [ticket + 1, offset]
    return vector


def decode_positions(vector: Sequence[int]) -> dict[int, int]:
    """Return from the sum how many records of each ticket are applied, for `commit` and `release`."""
    applied: dict[int, int] = {}
    for marked, offset in zip(vector[::2], vector[1::2], strict=True):
        if marked:
            applied[marked - 1] = max(offset, applied.get(marked - 1, 0))
    return applied


class _LedgerPosition(msgspec.Struct, kw_only=True):
    """How far all ranks are.

    - `ledger`: the state to start from, None for a new one. `live`: Redis has a later one, which some rank uses.
    - `used`: the last generation that has used it, as far as this rank knows.
    - `positions`: records applied of each ticket after `step`.
    """

    step: int = 0
    ledger: LedgerState | None = None
    live: bool = False
    used: int = 0
    positions: dict[int, int] = {}


class _PendingBatch(msgspec.Struct, frozen=True):
    """A batch that is not applied yet: its step, and whether the shard ends with it."""

    step: int
    records: list[Any]
    is_last: bool


class ShardedData:
    """What `Run.shards` returns: an iterable of this rank's batches, until all shards are finished.

    A rank without a shard takes part in steps without yielding a batch. When Redis has lost the ledger, or a lease, all
    ranks raise LedgerMissingError after the same step: model and ledger can only go back together.
    """

    def __init__(
        self,
        training: TrainingLoop,
        ledger: BlockingLedger,
        read: ReadShard,
        *,
        batch_size: int,
        epochs: int,
        collate_fn: Collate,
    ) -> None:
        self._training = training
        self._ledger = ledger
        self._read = read
        self._batch_size = batch_size
        self._epochs = epochs
        self._collate = collate_fn
        self._position = _LedgerPosition()
        self._entered = 0  # the generation that the ledger is used for
        self._open: OpenShard | None = None
        self._pending: _PendingBatch | None = None
        self._finished: list[tuple[Shard, int]] = []  # to be acknowledged, with their steps
        self._hold_s = RETRY_HOLD_S  # of the next shard that can't be read
        self._drained = False
        self._all_drained = False
        self._missing = False  # Redis has lost the ledger, or a lease
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        training = self._training
        while not (self._all_drained or training.over):
            training.between_steps()
            if self._entered != training.session.generation and not self._enter():
                continue
            taken = self._next_batch()
            if taken is None:
                samples = training.samples
                training.finish_step()
                if samples == training.samples and not self._all_drained:
                    time.sleep(IDLE_S)
                continue
            training.note_batch(MicroBatch(len(taken.records), first=True, last=True))
            yield as_tensors(self._collate(taken.records))
            training.check_stepped()
        self._count_set_aside()
        training.finish()
        self._ledger.close()

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def total_steps(self) -> int | None:
        return None

    @property
    def steps_of_one(self) -> int:
        return -(-self._training.samples // self._batch_size)

    def position(self, *, durable: bool) -> dict[str, Any]:
        if not durable or not self._position.live:
            here: dict[str, Any] = msgspec.to_builtins(self._position, str_keys=True)
            return here
        training = self._training
        with self._note_missing_ledger():
            if self._entered != training.session.generation:  # it leaves before it has entered this one
                self._ledger.begin(training.session.generation, after=self._position.used)
            if not self._missing:
                step = training.train_state.steps
                state = self._ledger.commit(step, self._position.positions)
                self._count_set_aside()
                position: dict[str, Any] = msgspec.to_builtins(_LedgerPosition(step=step, ledger=state))
                return position
        if training.train_state.ended or training.agent.directive(self._entered) is None:
            training.finish_step()  # the other ranks are in this step, and learn there that the ledger is missing
        raise LedgerMissingError(self._ledger.job)

    def seek(self, position: dict[str, Any], world_size: int) -> None:
        del world_size
        self._position = msgspec.convert(position, _LedgerPosition, strict=False)
        if self._pending is not None and self._pending.step <= self._position.step:
            self._apply_pending()  # the others have applied it: it is in the model that they sent

    def counts(self, rank: int, world_size: int) -> list[int]:
        position = None
        if self._open is not None:
            more = 0 if self._pending is None else len(self._pending.records)
            position = self._open.shard.ticket, self._open.offset + more
        flags = [self._drained, self._missing, self._position.live]
        return [*map(int, flags), *encode_position(position, rank, world_size)]

    def check(self, samples: int, counts: Sequence[int]) -> None:
        _, missing, _, *positions = counts
        marks = [mark for mark in positions[::2] if mark]
        if missing or (samples and len(set(marks)) < len(marks)):  # two ranks read one shard: one of them has no lease
            time.sleep(LINGER_S)  # slower ranks still have to read the sum that reports it
            raise LedgerMissingError(self._ledger.job)

    def advance(self, samples: int, counts: Sequence[int]) -> None:
        drained, _, live, *positions = counts
        if not samples:
            self._position.live = live > 0
            self._all_drained = drained == self._training.session.group.world_size
            if self._all_drained:
                self._epoch = self._epochs
            return
        self._position = msgspec.structs.replace(
            self._position, step=self._training.train_state.steps + 1, positions=decode_positions(positions)
        )
        if self._pending is not None:
            self._apply_pending()
            with self._note_missing_ledger():
                self._acknowledge()

    def _enter(self) -> bool:
        """Start using the ledger in this generation; return whether the generation is still current afterwards.

        In an empty step all ranks learn whether any of them has used the ledger: in an earlier generation some may have
        finished their empty steps while others were lost. Then rank 0 repairs the ledger, and all ranks do another
        empty step: a rank that has finished it knows that the ledger is repaired.
        """
        training, session = self._training, self._training.session
        generation = session.generation
        self._drained = self._all_drained = False
        self._do_empty_step()
        if training.over or session.generation != generation:
            return False
        if session.group.rank == 0:
            with self._note_missing_ledger():
                self._repair(generation)
        self._do_empty_step()
        if training.over or session.generation != generation:
            return False
        with self._note_missing_ledger():
            self._keep(self._ledger.begin(generation, after=generation))  # rank 0 has begun it
            self._acknowledge()
        self._position.live = True
        self._position.used = generation
        self._entered = generation
        return True

    def _do_empty_step(self) -> None:
        """Exchange flags with the other ranks, and enter the next generation if it is due."""
        self._training.finish_step()
        if not self._training.over:
            self._training.between_steps()

    def _repair(self, generation: int) -> None:
        training, position = self._training, self._position
        if position.live:
            self._ledger.begin(generation, after=position.used)
            self._ledger.release(training.train_state.steps, position.positions, training.session.names)
        else:
            self._ledger.restore(position.ledger, generation)

    def _keep(self, held: Collection[int]) -> None:
        """Drop shards without these tickets: a generation without this rank has given them to others."""
        if self._open is not None and self._open.shard.ticket not in held:
            log.warning("shard.lost", shard=self._open.shard.name)
            self._open = self._pending = None
        self._finished = [(shard, step) for shard, step in self._finished if shard.ticket in held]

    @contextlib.contextmanager
    def _note_missing_ledger(self) -> Iterator[None]:
        """Use the ledger. If Redis has lost it, this rank takes no more batches, and all learn it in the next step."""
        try:
            yield
        except (LedgerMissingError, LeaseLostError):
            self._missing = True

    def _next_batch(self) -> _PendingBatch | None:
        """Return the batch that is applied next, None if there is none now."""
        with self._note_missing_ledger():
            while self._pending is None and not self._drained and not self._missing:
                opened = self._open or self._lease()
                if opened is None or not (self._give_back(opened) if opened.error else self._take(opened)):
                    break
        return self._pending

    def _lease(self) -> OpenShard | None:
        leased = self._ledger.lease()
        if not leased:
            self._drained = leased is None
            return None
        (shard,) = leased
        self._epoch = shard.epoch
        self._open = OpenShard(shard, self._records(shard.name))
        return self._open

    def _records(self, name: str) -> Iterator[Any]:
        yield from self._read(name)  # a generator: the script's function is called with the first record

    def _take(self, opened: OpenShard) -> bool:
        """Take a batch, or find that there is none; return whether the shard could be read."""
        try:
            records = opened.take(self._batch_size)
        except Exception as error:  # noqa: BLE001 -- whatever is wrong with a shard, others can be read
            opened.error = f"{type(error).__name__}: {error}"
            opened.held_until = time.monotonic() + self._hold_s
            log.warning("shard.failed", shard=opened.shard.name, reason=opened.error, held_s=self._hold_s)
            self._hold_s = min(2 * self._hold_s, MAX_RETRY_HOLD_S)
            return False
        self._hold_s = RETRY_HOLD_S
        step = self._training.train_state.steps
        if records:
            self._pending = _PendingBatch(step + 1, records, opened.at_end)
        else:  # the worker that had it before has applied all of it
            self._ledger.ack([opened.shard], step)
            self._open = None
        return True

    def _give_back(self, opened: OpenShard) -> bool:
        """Let others try a shard that can't be read, once it was held long enough; return whether it was.

        All ranks have made a step since, so they have everything that was applied of it.
        """
        if time.monotonic() < opened.held_until:
            return False
        shard = opened.shard
        self._open = None
        if self._ledger.fail(shard, opened.error, applied=opened.offset):
            log.warning("shard.set_aside", shard=shard.name, epoch=shard.epoch, applied=opened.offset)
            text = (
                f"shard {shard.name!r} was set aside in epoch {shard.epoch} because it failed too often; its first "
                f"{opened.offset} records are in the model. Last failure: {opened.error}"
            )
            self._training.agent.send(Note(text=text))
        return True

    def _count_set_aside(self) -> None:
        """Note how many shards were given up, as a metric."""
        with self._note_missing_ledger():
            if aside := self._ledger.report().set_aside:
                self._training.note_metrics({SET_ASIDE: float(len(aside))})

    def _apply_pending(self) -> None:
        opened, pending = self._open, self._pending
        if opened is None or pending is None:
            return
        opened.offset += len(pending.records)
        if pending.is_last:
            self._finished.append((opened.shard, pending.step))
            self._open = None
        self._pending = None

    def _acknowledge(self) -> None:
        for shard, step in self._finished:
            self._ledger.ack([shard], step)
        self._finished.clear()


class OpenShard:
    """A shard that this rank reads. `offset`: how many of its records are applied.

    `error`: why it can't be read, "" if it can; it is kept until `held_until` then, by the monotonic clock.
    """

    def __init__(self, shard: Shard, records: Iterator[Any]) -> None:
        self.shard = shard
        self.offset = shard.start
        self.error = ""
        self.held_until = 0.0
        self._records = itertools.islice(records, shard.start, None)
        self._next: list[Any] | None = None

    def take(self, most: int) -> list[Any]:
        """Return the next records, none at the shard's end. Raises what reading raises."""
        ahead = list(itertools.islice(self._records, 1)) if self._next is None else self._next
        taken = [*ahead, *itertools.islice(self._records, most - len(ahead))]
        self._next = list(itertools.islice(self._records, 1))  # one ahead, to know whether the shard is at its end
        return taken

    @property
    def at_end(self) -> bool:
        """Whether all records have been taken."""
        return self._next == []
