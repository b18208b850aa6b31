"""Which samples of a map-style dataset come next: a pure function of a few numbers, which a checkpoint holds.

An epoch goes through the samples in an order of its own, one global batch a step, the last one smaller if need be. The
ranks of a step share its batch; how many they are changes nothing else. So every sample counts exactly once an epoch,
and in the same step, whatever instances came and went.
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
    """A place in the data. JSON of it belongs in a checkpoint; `msgspec.convert` makes it from that again.

    - `length`: samples of the dataset. `global_batch`: samples of a step, of all ranks together.
    - `epochs`: how many there are; `epoch`: how many are over. `position`: samples of this one that are applied.

    Raises SpecError for numbers that can't be, as a msgspec.ValidationError when it is made from JSON.
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
        """Whether all epochs are over."""
        return self.epoch >= self.epochs


@functools.lru_cache(maxsize=2)  # of the epoch that runs, and of the next
def order(seed: int, epoch: int, length: int, *, shuffle: bool = True) -> Indices:
    """Return in which order an epoch goes through `length` samples; read-only.

    The same on every machine and with every numpy, so that a checkpoint outlives them: numpy promises that of what its
    bit generators give, not of its `permutation`.
    """
    import numpy as np

    indices = np.arange(length, dtype=np.int64)
    if shuffle:
        draws = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(length)
        indices = np.argsort(draws, kind="stable").astype(np.int64, copy=False)
    indices.flags.writeable = False
    return indices


def batch(cursor: DatasetCursor) -> Indices:
    """Return the samples of the next global batch, in order; none when all epochs are over."""
    if cursor.done:
        return order(0, 0, 0, shuffle=False)
    epoch = order(cursor.seed, cursor.epoch, cursor.length, shuffle=cursor.shuffle)
    return epoch[cursor.position : cursor.position + cursor.global_batch]


def part(indices: Indices, rank: int, world_size: int) -> Indices:
    """Return what one rank does of a global batch.

    The parts of all ranks, one after the other, are the batch. They differ by one sample at most, the first having
    more; the last are empty where there are more ranks than samples.
    """
    share, more = divmod(len(indices), world_size)
    start = rank * share + min(rank, more)
    return indices[start : start + share + (rank < more)]


def micro_batches(indices: Indices, size: int | None = None) -> list[Indices]:
    """Return a part in pieces of `size` samples, the last one smaller if need be; whole for None, [] for an empty one.

    Raises SpecError for a size below 1.
    """
    if size is not None and size < 1:
        raise SpecError("micro_batch", size, "1 or more, or None")
    size = size or max(1, len(indices))
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def advance(cursor: DatasetCursor, taken: int) -> DatasetCursor:
    """Return the place after `taken` more samples of the epoch are applied; at its end, the start of the next.

    Raises ValueError for more samples than the epoch has left, which no `batch` has.
    """
    position = cursor.position + taken
    if cursor.done or not cursor.position < position <= cursor.length:
        raise ValueError(f"{taken} samples can't be taken at {cursor}")
    if position == cursor.length:
        return msgspec.structs.replace(cursor, epoch=cursor.epoch + 1, position=0)
    return msgspec.structs.replace(cursor, position=position)


def steps_per_epoch(cursor: DatasetCursor) -> int:
    """Return how many global batches an epoch has, the last and smaller one included."""
    return -(-cursor.length // cursor.global_batch)


def total_steps(cursor: DatasetCursor) -> int:
    """Return how many steps all epochs have together, from the first on."""
    return cursor.epochs * steps_per_epoch(cursor)


def check_length(cursor: DatasetCursor, length: int) -> None:
    """Raise DatasetChangedError unless the dataset has as many samples as when the cursor was made."""
    if length != cursor.length:
        raise DatasetChangedError(cursor.length, length)
