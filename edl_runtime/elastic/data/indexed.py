"""The batches of one rank from a dataset that every rank can index: each sample counts exactly once an epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from edl_runtime.elastic.comm.agent_protocol import Note, die_with_parent
from edl_runtime.elastic.errors import StepError
from edl_runtime.elastic.training.loop import MicroBatch, TrainingLoop
from edl_runtime.errors import SpecError
from edl_runtime.shards.errors import DatasetChangedError
from edl_runtime.shards.ledger import order

SAME_ON_ALL_RANKS = ("epochs", "global_batch", "instance_batch", "seed", "shuffle")
"""Arguments of `run.data` that have to be the same on all ranks, besides the dataset's length."""

MAX_SEEDS = 1 << 62


def count_steps(samples: int, batch: int, epochs: int = 1) -> int:
    """Return how many steps of `batch` samples each epoch has, in all epochs."""
    return epochs * -(-samples // batch)


class DatasetCursor(msgspec.Struct, frozen=True, kw_only=True):
    """A position in the data, kept in checkpoints as JSON: a pure function of it says which samples come next.

    Each epoch has its own order of the samples. A step takes one global batch; the last of an epoch may be smaller. The
    ranks share the batch, however many they are. So every sample counts exactly once an epoch, in the same step, while
    instances join and leave.

    - `length`: samples of the dataset. `global_batch`: samples of a step, of all ranks together.
    - `epochs`: how many to train; `epoch`: how many are finished. `position`: applied samples of the current one.
    """

    length: int
    global_batch: int
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    epoch: int = 0
    position: int = 0

    @property
    def done(self) -> bool:
        """Whether all epochs are finished."""
        return self.epoch >= self.epochs

    @property
    def total_steps(self) -> int:
        """The number of steps of all epochs together."""
        return count_steps(self.length, self.global_batch, self.epochs)

    def steps_of_one(self, batch: int) -> int:
        """Return how many steps of `batch` samples one instance would have made so far."""
        return count_steps(self.length, batch, self.epoch) + count_steps(self.position, batch)

    def batch(self) -> np.ndarray:
        """Return the samples of the next global batch, in order; none when all epochs are finished."""
        if self.done:
            return np.empty(0, np.int64)
        epoch = order(self.seed, self.epoch, self.length, shuffle=self.shuffle)
        return epoch[self.position : self.position + self.global_batch]

    def advance(self, taken: int) -> DatasetCursor:
        """Return the position after `taken` more samples; at the end of the epoch, the start of the next.

        Raises ValueError for more samples than the epoch has left.
        """
        position = self.position + taken
        if self.done or not self.position < position <= self.length:
            raise ValueError(f"{taken} samples can't be taken at {self}")
        if position == self.length:
            return msgspec.structs.replace(self, epoch=self.epoch + 1, position=0)
        return msgspec.structs.replace(self, position=position)


def part(indices: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """Return one rank's part of a global batch.

    Parts are consecutive and differ by one sample at most, the first ones having more. With more ranks than samples the
    last parts are empty.
    """
    share, more = divmod(len(indices), world_size)
    start = rank * share + min(rank, more)
    return indices[start : start + share + (rank < more)]


def micro_batches(indices: np.ndarray, size: int | None = None) -> list[np.ndarray]:
    """Split a part into pieces of `size` samples, the last one may be smaller; None does not split. [] if empty."""
    size = size or max(1, len(indices))
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def check_length(before: int, now: int) -> None:
    """Raise DatasetChangedError unless the dataset has as many samples as before."""
    if now != before:
        raise DatasetChangedError(before, now)


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """See `Run.data`."""

    global_batch: int | None
    instance_batch: int | None
    micro_batch: int | None
    num_workers: int
    collate_fn: Collate | None


class IndexedData:
    """What `Run.data` returns: an iterable of this rank's remaining batches, of all epochs.

    Where a step has fewer samples than ranks, a rank without one takes part in it without yielding a batch.
    """

    def __init__(self, training: TrainingLoop, dataset: Any, batching: BatchOptions, start: DatasetCursor) -> None:
        self._training = training
        self._dataset = dataset
        self._batching = batching
        self._cursor = start
        self._ahead = start
        order = start.seed % MAX_SEEDS, int(start.shuffle)
        self._numbers = [start.length, start.epochs, batching.global_batch or 0, batching.instance_batch or 0, *order]

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self._loaded)

    def epochs(self, reader: Iterable[Any] | None = None) -> Iterator[tuple[int, Iterator[Any]]]:
        """Yield the number of each remaining epoch, from 0, and its batches; those of `through(reader)` if given.

        All ranks come to the end of an epoch, also those without a batch in its last step: there a script may evaluate,
        call `run.mean`, and decide. What it registers and changes there is in that step's checkpoint.
        """
        begin = self._loaded if reader is None else self._read_by(reader)
        self._note_if_done()
        while not self._at_end:
            epoch = self._cursor.epoch
            yield epoch, self._batches(begin, epoch)
            self._training.check_stepped()
        self._training.finish()

    def through(self, reader: Iterable[Any]) -> Iterator[Any]:
        """Yield what `reader` makes of the batches of `local`, until all epochs are over.

        For a DistillReader, which reads ahead: only what was stepped counts. It is iterated once for each epoch and
        each generation. Raises SpecError for a reader with a number of epochs: it would start the next one before this
        one ends.
        """
        return self._batches(self._read_by(reader))

    def local(self) -> Iterator[Any]:
        """Yield this rank's remaining batches of an epoch, as tuples of arrays: the source of a DistillReader.

        `collate_fn` converts the samples. Any thread may read ahead; only with `through`.
        """
        ahead = self._ahead
        for indices in self._indices(ahead):
            samples = [self._dataset[int(index)] for index in indices]
            yield (self._batching.collate_fn or _stacked)(samples)

    @property
    def epoch(self) -> int:
        return self._cursor.epoch

    @property
    def total_steps(self) -> int | None:
        """All steps with a `global_batch`; None with an `instance_batch`: they depend on the number of instances."""
        return self._cursor.total_steps if self._batching.instance_batch is None else None

    @property
    def steps_of_one(self) -> int:
        return self._cursor.steps_of_one(self._batching.instance_batch or self._cursor.global_batch)

    def position(self, *, durable: bool) -> dict[str, Any]:
        del durable  # it is the same in both cases
        position: dict[str, Any] = msgspec.to_builtins(self._cursor)
        return position

    def seek(self, position: dict[str, Any], world_size: int) -> None:
        """Raise DatasetChangedError for another dataset, SpecError for another order of it."""
        there = msgspec.convert(position, DatasetCursor)
        mine = self._cursor
        check_length(there.length, mine.length)
        for field in ("seed", "shuffle"):
            before, now = getattr(there, field), getattr(mine, field)
            if before != now:
                raise SpecError(f"run.data({field}=…)", now, f"{before}, with which this training began")
        self._cursor = msgspec.structs.replace(mine, epoch=there.epoch, position=there.position)
        if self._batching.instance_batch is not None:
            size = self._batching.instance_batch * world_size
            self._cursor = msgspec.structs.replace(self._cursor, global_batch=size)

    def counts(self, rank: int, world_size: int) -> list[int]:
        del world_size
        return [int(rank == 0) * number for number in self._numbers]

    def check(self, samples: int, counts: Sequence[int]) -> None:
        """Raise DatasetChangedError, SpecError when rank 0 has other data, or another order of it."""
        del samples
        if [*counts] == self._numbers:
            return
        length, *others = counts
        check_length(length, self._cursor.length)
        for field, there, mine in zip(SAME_ON_ALL_RANKS, others, self._numbers[1:], strict=True):
            if there != mine:
                raise SpecError(f"run.data({field}=…)", mine, f"{there}, as rank 0 has it")

    def advance(self, samples: int, counts: Sequence[int]) -> None:
        del counts
        self._cursor = self._cursor.advance(samples)

    def _loaded(self) -> Iterator[Any]:
        return self._load(self._indices(self._cursor))

    def _read_by(self, reader: Iterable[Any]) -> Callable[[], Iterator[Any]]:
        epochs: int | None = getattr(reader, "epochs", None)
        if epochs is not None:
            raise SpecError("DistillReader(epochs=…)", epochs, "None with data.through, which counts epochs itself")
        return lambda: iter(reader)

    def _batches(self, begin: Callable[[], Iterator[Any]], epoch: int | None = None) -> Iterator[Any]:
        """Yield the remaining batches of this epoch or, with the end of the training, of all."""
        self._note_if_done()
        while self._is_left(epoch):
            self._training.between_steps()
            if self._is_left(epoch):
                yield from self._generation(begin)
        if epoch is None:
            self._training.finish()

    def _note_if_done(self) -> None:
        """Note in the job's events that the checkpoint has all epochs, if so: there are no batches then."""
        training = self._training
        if self._cursor.done and not training.over and training.session.group.rank == 0:
            text = (
                f"all {self._cursor.epochs} epochs are trained already; give more epochs to continue, or another "
                "location for checkpoints to start again"
            )
            training.agent.send(Note(text=text))

    def _is_left(self, epoch: int | None) -> bool:
        return not self._at_end and epoch in (None, self._cursor.epoch)

    def _generation(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield an epoch's batches while the group stays the same."""
        training, epoch = self._training, self._cursor.epoch
        generation = training.session.generation
        self._ahead = self._cursor
        batches = begin()
        try:
            while self._is_left(epoch) and training.session.generation == generation:
                pieces = self._pieces(self._cursor)
                if not pieces:
                    training.finish_step()
                for number, piece in enumerate(pieces):
                    batch = _next(batches)
                    training.note_batch(MicroBatch(len(piece), first=number == 0, last=number == len(pieces) - 1))
                    yield batch
                    training.check_stepped()
                    if training.over or training.session.generation != generation:
                        break
                if self._is_left(epoch):
                    training.between_steps()
            if training.session.generation == generation and not training.over:
                next(batches, None)  # so that a reader sees the epoch's end
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()

    @property
    def _at_end(self) -> bool:
        return self._cursor.done or self._training.over

    def _pieces(self, cursor: DatasetCursor) -> list[np.ndarray]:
        """Return the indices of this rank's micro batches of the next step."""
        group = self._training.session.group
        own = part(cursor.batch(), group.rank, group.world_size)
        return micro_batches(own, self._batching.micro_batch) if len(own) else []

    def _indices(self, cursor: DatasetCursor) -> Iterator[np.ndarray]:
        """Yield the indices of the epoch's remaining steps."""
        epoch = cursor.epoch
        while not cursor.done and cursor.epoch == epoch:
            yield from self._pieces(cursor)
            cursor = cursor.advance(len(cursor.batch()))

    def _load(self, batches: Iterator[np.ndarray]) -> Iterator[Any]:
        from paddle.io import DataLoader

        collate: Any = self._batching.collate_fn or default_collate
        if not self._batching.num_workers:
            for indices in batches:
                yield as_tensors(collate([self._dataset[int(index)] for index in indices]))
            return
        lists = [indices.tolist() for indices in batches]
        sampler: Any = lists  # any iterable of lists does
        parent = os.getpid()
        loader: Any = iter(
            DataLoader(
                self._dataset,
                batch_sampler=sampler,
                num_workers=self._batching.num_workers,
                collate_fn=collate,
                worker_init_fn=lambda _: die_with_parent(parent),  # Paddle's own check of its parent does not work
            )
        )
        try:
            yield from loader
        finally:
            loader._try_shutdown_all(1)  # noqa: SLF001 -- else one of its threads keeps it and its workers alive


def _next(batches: Iterator[Any]) -> Any:
    try:
        return next(batches)
    except StopIteration:
        raise StepError(
            "the reader in run.data ended before the epoch", "return a batch for each of data.local"
        ) from None


def _stacked(samples: list[Any]) -> tuple[np.ndarray, ...]:
    if not isinstance(samples[0], tuple | list):
        return (np.stack(samples),)
    return tuple(np.stack([np.asarray(slot) for slot in slots]) for slots in zip(*samples, strict=True))


Collate = Callable[[list[Any]], Any]


def as_tensors(batch: Any) -> Any:
    """Return a batch with its arrays as tensors, as paddle.io.DataLoader does."""
    match batch:
        case np.ndarray():
            import paddle

            return paddle.to_tensor(batch)
        case list() | tuple():
            return [as_tensors(slot) for slot in batch]
        case dict():
            return {name: as_tensors(slot) for name, slot in batch.items()}
    return batch


def default_collate(samples: list[Any]) -> Any:
    """Return the samples' slots, each stacked."""
    from paddle.io.dataloader.collate import default_collate_fn

    return default_collate_fn(samples)  # type: ignore[no-untyped-call]
