"""The batches of one rank, from shards that ranks lease: files, or a stream that grows while it is read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from edl_runtime.elastic.collating import Collate, as_tensors
from edl_runtime.elastic.training import Micro, Training
from edl_runtime.shards.blocking import BlockingLedger
from edl_runtime.shards.positions import Position, from_vector, to_vector
from edl_runtime.shards.state import LedgerState, Shard

Read = Callable[[str], Iterable[Any]]

IDLE_S = 0.02
"""How long all ranks wait when none has a shard and not all are finished: a stream may grow."""


class _Place(msgspec.Struct, kw_only=True):
    """How far all ranks are.

    - `ledger`: to begin with, None for a new one; `live`: Redis has a later one.
    - `positions`: what is applied of which ticket after `step`.
    """

    step: int = 0
    ledger: LedgerState | None = None
    live: bool = False
    positions: dict[int, int] = {}


class _Open:
    """A shard that is being read, of which `offset` records are applied."""

    def __init__(self, shard: Shard, records: Iterator[Any]) -> None:
        self.shard = shard
        self.offset = shard.start
        self._records = itertools.chain(itertools.islice(records, shard.start, None))
        self._next = list(itertools.islice(self._records, 1))

    def take(self, most: int) -> list[Any]:
        """Return the next records, none at the shard's end. Raises what reading raises."""
        taken = [*self._next, *itertools.islice(self._records, most - len(self._next))]
        self._next = list(itertools.islice(self._records, 1))
        return taken

    @property
    def is_through(self) -> bool:
        """Whether all records have been taken."""
        return not self._next


class _Taken(msgspec.Struct, frozen=True):
    """A batch that is not applied yet: of which step it is to be, and whether the shard ends with it."""

    step: int
    records: list[Any]
    is_last: bool


class ShardData:
    """What `Run.shards` returns: an iterable of this rank's batches, until all shards are finished.

    A rank that has no shard takes part in steps without yielding a batch.
    """

    def __init__(
        self, training: Training, ledger: BlockingLedger, read: Read, *, batch_size: int, collate_fn: Collate
    ) -> None:
        self._training = training
        self._ledger = ledger
        self._read = read
        self._batch_size = batch_size
        self._collate = collate_fn
        self._place = _Place()
        self._entered = 0  # the generation that the ledger is used for
        self._open: _Open | None = None
        self._taken: _Taken | None = None
        self._finished: list[tuple[Shard, int]] = []  # to be acknowledged, with their steps
        self._drained = False
        self._all_drained = False
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        training = self._training
        try:
            while not self._all_drained:
                if self._entered != training.team.generation and not self._enter():
                    continue
                taken = self._next_batch()
                if taken is None:
                    samples = training.samples
                    training.finish_step()
                    if samples == training.samples and not self._all_drained:
                        time.sleep(IDLE_S)
                    continue
                training.draw(Micro(len(taken.records), first=True, last=True))
                yield as_tensors(self._collate(taken.records))
                training.check_stepped()
        except GeneratorExit:
            training.left_early()
            raise
        training.finish()
        self._ledger.close()

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def total_steps(self) -> int | None:
        return None

    def place(self, *, durable: bool) -> dict[str, Any]:
        if durable and self._place.live:
            step = self._training.standing.steps
            state = self._ledger.commit(step, self._place.positions)
            place: dict[str, Any] = msgspec.to_builtins(_Place(step=step, ledger=state))
            return place
        here: dict[str, Any] = msgspec.to_builtins(self._place, str_keys=True)
        return here

    def go_to(self, place: dict[str, Any], world_size: int) -> None:
        del world_size
        self._place = msgspec.convert(place, _Place, strict=False)
        if self._taken is not None and self._taken.step <= self._place.step:
            self._apply_taken()  # by the others: it is in the model that they gave

    def vector(self, rank: int, world_size: int) -> list[int]:
        position = None
        if self._open is not None and self._taken is not None:
            position = Position(self._open.shard.ticket, self._open.offset + len(self._taken.records))
        return [int(self._drained), *to_vector(position, rank, world_size)]

    def advance(self, samples: int, vector: Sequence[int]) -> None:
        drained, *positions = vector
        if not samples:
            self._all_drained = drained == self._training.team.group.world_size
            return
        self._place = msgspec.structs.replace(
            self._place, step=self._training.standing.steps + 1, positions=from_vector(positions)
        )
        if self._taken is not None:
            self._apply_taken()
            self._acknowledge()

    def _enter(self) -> bool:
        """Use the ledger in this generation; return whether it is still the present one afterwards.

        Rank 0 puts the ledger right, and all ranks do an empty step together: whoever is through with it knows that.
        """
        team = self._training.team
        generation = team.generation
        if team.group.rank == 0:
            if self._place.live:
                self._ledger.begin(generation)
                self._ledger.release(self._training.standing.steps, self._place.positions, team.names)
            else:
                self._ledger.restore(self._place.ledger, generation)
        self._drained = self._all_drained = False
        self._training.finish_step(empty=True)
        if team.generation != generation:
            return False
        self._ledger.begin(generation)
        self._place.live = True
        self._entered = generation
        self._acknowledge()
        return True

    def _next_batch(self) -> _Taken | None:
        """Return what is to be applied next, None if there is nothing now."""
        while self._taken is None and not self._drained:
            if self._open is None and not self._lease():
                break
            self._take()
        return self._taken

    def _lease(self) -> bool:
        leased = self._ledger.lease()
        if not leased:
            self._drained = leased is None
            return False
        (shard,) = leased
        self._epoch = shard.epoch
        try:
            self._open = _Open(shard, iter(self._read(shard.name)))
        except Exception as error:  # noqa: BLE001 -- whatever is wrong with a shard, others can be read
            self._ledger.fail(shard, _said(error), applied=shard.start)
            return True
        return True

    def _take(self) -> None:
        opened = self._open
        if opened is None:
            return
        try:
            records = opened.take(self._batch_size)
        except Exception as error:  # noqa: BLE001 -- as above
            self._ledger.fail(opened.shard, _said(error), applied=opened.offset)
            self._open = None
            return
        step = self._training.standing.steps
        if records:
            self._taken = _Taken(step + 1, records, opened.is_through)
        else:  # whoever had it before had applied all of it
            self._ledger.ack([opened.shard], step)
            self._open = None

    def _apply_taken(self) -> None:
        opened, taken = self._open, self._taken
        if opened is None or taken is None:
            return
        opened.offset += len(taken.records)
        if taken.is_last:
            self._finished.append((opened.shard, taken.step))
            self._open = None
        self._taken = None

    def _acknowledge(self) -> None:
        for shard, step in self._finished:
            self._ledger.ack([shard], step)
        self._finished.clear()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
