"""The next samples of a map-style dataset: a pure function of a few numbers, which a checkpoint holds.

Each epoch has its own order of the samples. A step takes one global batch; the last of an epoch may be smaller. The
ranks share the batch, however many they are. So every sample counts exactly once an epoch, in the same step, while
instances join and leave.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.shards.errors import DatasetChangedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]


class DatasetCursor(msgspec.Struct, frozen=True, kw_only=True):
    """A position in the data, kept in checkpoints as JSON.

    - `length`: samples of the dataset. `global_batch`: samples of a step, of all ranks together.
    - `epochs`: how many to train; `epoch`: how many are finished. `position`: applied samples of the current one.

    Raises SpecError for numbers that are not allowed; from JSON that is a msgspec.ValidationError.
    """

    length: int
    global_batch: int
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        for field, least in (("length", 1), ("global_batch", 1), ("epochs", 1), ("seed", 0), ("epoch", 0)):
            if getattr(self, field) < least:
                raise SpecError(field, getattr(self, field), f"{least} or more")
        if not 0 <= self.position < self.length:
            raise SpecError("position", self.position, f"0 to {self.length - 1}")

    @property
    def done(self) -> bool:
        """Whether all epochs are finished."""
        return self.epoch >= self.epochs


@functools.lru_cache(maxsize=2)  # for the current epoch and the next
def order(seed: int, epoch: int, length: int, *, shuffle: bool = True) -> Indices:
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


def batch(cursor: DatasetCursor) -> Indices:
    """Return the samples of the next global batch, in order; none when all epochs are finished."""
    if cursor.done:
        return order(0, 0, 0, shuffle=False)
    epoch = order(cursor.seed, cursor.epoch, cursor.length, shuffle=cursor.shuffle)
    return epoch[cursor.position : cursor.position + cursor.global_batch]


def part(indices: Indices, rank: int, world_size: int) -> Indices:
    """Return one rank's part of a global batch.

    Parts are consecutive and differ by one sample at most, the first ones having more. With more ranks than samples the
    last parts are empty.
    """
    share, more = divmod(len(indices), world_size)
    start = rank * share + min(rank, more)
    return indices[start : start + share + (rank < more)]


def micro_batches(indices: Indices, size: int | None = None) -> list[Indices]:
    """Split a part into pieces of `size` samples, the last one may be smaller; None does not split. [] if empty.

    Raises SpecError for a size below 1.
    """
    if size is not None and size < 1:
        raise SpecError("micro_batch", size, "1 or more, or None")
    size = size or max(1, len(indices))
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def advance(cursor: DatasetCursor, taken: int) -> DatasetCursor:
    """Return the position after `taken` more samples; at the end of the epoch, the start of the next.

    Raises ValueError for more samples than the epoch has left.
    """
    position = cursor.position + taken
    if cursor.done or not cursor.position < position <= cursor.length:
        raise ValueError(f"{taken} samples can't be taken at {cursor}")
    if position == cursor.length:
        return msgspec.structs.replace(cursor, epoch=cursor.epoch + 1, position=0)
    return msgspec.structs.replace(cursor, position=position)


def steps_per_epoch(cursor: DatasetCursor) -> int:
    """Return the number of global batches of an epoch."""
    return -(-cursor.length // cursor.global_batch)


def total_steps(cursor: DatasetCursor) -> int:
    """Return the number of steps of all epochs together."""
    return cursor.epochs * steps_per_epoch(cursor)


def check_length(cursor: DatasetCursor, length: int) -> None:
    """Raise DatasetChangedError unless the dataset has as many samples as the cursor says."""
    if length != cursor.length:
        raise DatasetChangedError(cursor.length, length)
