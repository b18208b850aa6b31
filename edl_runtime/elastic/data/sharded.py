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
from edl_runtime.shards.ledger import BlockingLedger
from edl_runtime.shards.ledger_state import LedgerState, ReadPosition, Shard, from_vector, has_conflict, to_vector

ReadShard = Callable[[str], Iterable[Any]]

IDLE_S = 0.02
"""How long all ranks wait when none has a shard and not all are finished: a stream may grow."""

RETRY_HOLD_S = 1.0
MAX_RETRY_HOLD_S = 30.0
"""How long a process keeps a shard that it can't read before anybody may try it again, doubled with each that it can't
read in a row: what is wrong may be the storage, and soon mended."""

SET_ASIDE = "shards_set_aside"
"""How many shards were given up, as a metric of checkpoints and results; none without any."""

log = get_logger(__name__)


def hold_s(failed_in_a_row: int) -> float:
    """Return for how many seconds a shard is kept that can't be read, after so many others in a row."""
    return min(RETRY_HOLD_S * 2.0**failed_in_a_row, MAX_RETRY_HOLD_S)


class _LedgerPosition(msgspec.Struct, kw_only=True):
    """How far all ranks are.

    - `ledger`: to begin with, None for a new one; `live`: Redis has a later one, which some rank has begun to use.
    - `positions`: what is applied of which ticket after `step`.
    """

    step: int = 0
    ledger: LedgerState | None = None
    live: bool = False
    positions: dict[int, int] = {}


class _PendingBatch(msgspec.Struct, frozen=True):
    """A batch that is not applied yet: of which step it is to be, and whether the shard ends with it."""

    step: int
    records: list[Any]
    is_last: bool


class ShardedData:
    """What `Run.shards` returns: an iterable of this rank's batches, until all shards are finished.

    A rank that has no shard takes part in steps without yielding a batch. When Redis has forgotten the ledger, or a
    lease, all ranks raise LedgerMissingError after the same step: model and ledger can only go back together.
    """

    def __init__(
        self, training: TrainingLoop, ledger: BlockingLedger, read: ReadShard, *, batch_size: int, collate_fn: Collate
    ) -> None:
        self._training = training
        self._ledger = ledger
        self._read = read
        self._batch_size = batch_size
        self._collate = collate_fn
        self._place = _LedgerPosition()
        self._entered = 0  # the generation that the ledger is used for
        self._open: OpenShard | None = None
        self._taken: _PendingBatch | None = None
        self._finished: list[tuple[Shard, int]] = []  # to be acknowledged, with their steps
        self._failed_in_a_row = 0
        self._drained = False
        self._all_drained = False
        self._forgotten = False  # the ledger, or a lease, by Redis
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
            training.draw(MicroBatch(len(taken.records), first=True, last=True))
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

    def place(self, *, durable: bool) -> dict[str, Any]:
        if not durable or not self._place.live:
            here: dict[str, Any] = msgspec.to_builtins(self._place, str_keys=True)
            return here
        training = self._training
        with self._note_forgotten_ledger():
            if self._entered != training.session.generation:  # it leaves on the way into this one
                self._ledger.begin(training.session.generation)
            if not self._forgotten:
                step = training.train_state.steps
                state = self._ledger.commit(step, self._place.positions)
                self._count_set_aside()
                place: dict[str, Any] = msgspec.to_builtins(_LedgerPosition(step=step, ledger=state))
                return place
        if training.train_state.ended or training.agent.directive(self._entered) is None:
            training.finish_step()  # all others are in it: they hear of it there, and so does this rank
        raise LedgerMissingError(self._ledger.job)

    def seek(self, place: dict[str, Any], world_size: int) -> None:
        del world_size
        self._place = msgspec.convert(place, _LedgerPosition, strict=False)
        if self._taken is not None and self._taken.step <= self._place.step:
            self._apply_taken()  # by the others: it is in the model that they gave

    def vector(self, rank: int, world_size: int) -> list[int]:
        position = None
        if self._open is not None:
            more = 0 if self._taken is None else len(self._taken.records)
            position = ReadPosition(self._open.shard.ticket, self._open.offset + more)
        flags = [self._drained, self._forgotten, self._place.live]
        return [*map(int, flags), *to_vector(position, rank, world_size)]

    def check(self, samples: int, vector: Sequence[int]) -> None:
        _, forgotten, _, *positions = vector
        if forgotten or (samples and has_conflict(positions)):
            time.sleep(LINGER_S)
            raise LedgerMissingError(self._ledger.job)

    def advance(self, samples: int, vector: Sequence[int]) -> None:
        drained, _, live, *positions = vector
        if not samples:
            self._place.live = live > 0
            self._all_drained = drained == self._training.session.group.world_size
            return
        self._place = msgspec.structs.replace(
            self._place, step=self._training.train_state.steps + 1, positions=from_vector(positions)
        )
        if self._taken is not None:
            self._apply_taken()
            with self._note_forgotten_ledger():
                self._acknowledge()

    def _enter(self) -> bool:
        """Use the ledger in this generation; return whether it is still the present one afterwards.

        In an empty step all ranks hear whether any has used the ledger: one of those that were lost in the empty steps
        of a generation before may have been through with them. Then rank 0 puts the ledger right, and all ranks do
        another one: whoever is through with it knows that.
        """
        training, session = self._training, self._training.session
        generation = session.generation
        self._drained = self._all_drained = False
        self._do_empty_step()
        if training.over or session.generation != generation:
            return False
        if session.group.rank == 0:
            with self._note_forgotten_ledger():
                self._put_right(generation)
        self._do_empty_step()
        if training.over or session.generation != generation:
            return False
        with self._note_forgotten_ledger():
            self._keep(self._ledger.begin(generation))
            self._acknowledge()
        self._place.live = True
        self._entered = generation
        return True

    def _do_empty_step(self) -> None:
        """Hear of the others' flags, and be in the next generation if it is due."""
        self._training.finish_step()
        if not self._training.over:
            self._training.between_steps()

    def _put_right(self, generation: int) -> None:
        if self._place.live:
            self._ledger.begin(generation)
            self._ledger.release(self._training.train_state.steps, self._place.positions, self._training.session.names)
        else:
            self._ledger.restore(self._place.ledger, generation)

    def _keep(self, held: Collection[int]) -> None:
        """Let go of shards but for these tickets: a generation that this rank was not in has given them to others."""
        if self._open is not None and self._open.shard.ticket not in held:
            log.warning("shard.lost", shard=self._open.shard.name)
            self._open = self._taken = None
        self._finished = [(shard, step) for shard, step in self._finished if shard.ticket in held]

    @contextlib.contextmanager
    def _note_forgotten_ledger(self) -> Iterator[None]:
        """Do what needs the ledger. If Redis has forgotten it, this rank takes no more, and tells all in a step."""
        try:
            yield
        except (LedgerMissingError, LeaseLostError):
            self._forgotten = True

    def _next_batch(self) -> _PendingBatch | None:
        """Return what is to be applied next, None if there is nothing now."""
        with self._note_forgotten_ledger():
            while self._taken is None and not self._drained and not self._forgotten:
                opened = self._open or self._lease()
                if opened is None or not (self._give_back(opened) if opened.trouble else self._take(opened)):
                    break
        return self._taken

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
        yield from self._read(name)  # which is not called before the first is asked for

    def _take(self, opened: OpenShard) -> bool:
        """Take a batch, or find that there is none; return whether the shard could be read."""
        try:
            records = opened.take(self._batch_size)
        except Exception as error:  # noqa: BLE001 -- whatever is wrong with a shard, others can be read
            opened.trouble = f"{type(error).__name__}: {error}"
            held_s = hold_s(self._failed_in_a_row)
            opened.held_until = time.monotonic() + held_s
            self._failed_in_a_row = min(self._failed_in_a_row + 1, 16)
            log.warning("shard.failed", shard=opened.shard.name, reason=opened.trouble, held_s=held_s)
            return False
        self._failed_in_a_row = 0
        step = self._training.train_state.steps
        if records:
            self._taken = _PendingBatch(step + 1, records, opened.is_through)
        else:  # whoever had it before had applied all of it
            self._ledger.ack([opened.shard], step)
            self._open = None
        return True

    def _give_back(self, opened: OpenShard) -> bool:
        """Let others try a shard that can't be read, when it was held long enough; return whether it was.

        All ranks have made a step since, so they have what is applied of it.
        """
        if time.monotonic() < opened.held_until:
            return False
        shard = opened.shard
        self._open = None
        if self._ledger.fail(shard, opened.trouble, applied=opened.offset):
            log.warning("shard.set_aside", shard=shard.name, epoch=shard.epoch, applied=opened.offset)
            text = (
                f"shard {shard.name!r} was set aside in epoch {shard.epoch}, for it failed too often; its first "
                f"{opened.offset} records are in the model. The last failure: {opened.trouble}"
            )
            self._training.agent.send(Note(text=text))
        return True

    def _count_set_aside(self) -> None:
        """Let the next checkpoint and the result say how many shards were given up."""
        with self._note_forgotten_ledger():
            if aside := self._ledger.report().set_aside:
                self._training.note_metrics({SET_ASIDE: float(len(aside))})

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


# A shard that one rank has in hand: how far it is read, and why it can't be.


class OpenShard:
    """A shard of these records, of which `offset` are applied.

    - `trouble`: why it can't be read, "" if it can. `held_until`: it is kept so long then, by the monotonic clock.
    """

    def __init__(self, shard: Shard, records: Iterator[Any]) -> None:
        self.shard = shard
        self.offset = shard.start
        self.trouble = ""
        self.held_until = 0.0
        self._records = itertools.islice(records, shard.start, None)
        self._next: list[Any] | None = None

    def take(self, most: int) -> list[Any]:
        """Return the next records, none at the shard's end. Raises what reading raises."""
        following = self._following() if self._next is None else self._next
        taken = [*following, *itertools.islice(self._records, most - len(following))]
        self._next = self._following()
        return taken

    @property
    def is_through(self) -> bool:
        """Whether all records have been taken."""
        return self._next == []

    def _following(self) -> list[Any]:
        return list(itertools.islice(self._records, 1))
