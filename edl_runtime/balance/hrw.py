"""Highest random weight (rendezvous) hashing: pairs by falling score.

A score has 64 bits: the hashes of both ids, xor'ed and mixed. It is the same on every machine and with every version of
Python and numpy, because unsigned numbers wrap around everywhere alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Hashes: TypeAlias = NDArray[np.uint64]
    Places: TypeAlias = NDArray[np.intp]

PAIRS_PER_PLACE = 4
"""Pairs of one round, for each remaining item and bin: enough to match most of them."""


class BinCapacity(Protocol):
    """The free slots of bins. They only decrease."""

    def has(self, bin_: int) -> bool:
        """Return whether the bin has a slot."""

    def take(self, bin_: int) -> bool:
        """Use up a slot of the bin; return whether it had one."""


def hashes(role: str, ids: Sequence[str]) -> Hashes:
    """Return a hash of each id, which depends on the role."""
    import numpy as np

    person = role.encode()
    digests = b"".join(blake2b(id_.encode(), digest_size=8, person=person).digest() for id_ in ids)
    return np.frombuffer(digests, ">u8").astype(np.uint64)


def match(
    items: Hashes, bins: Hashes, item_places: Places, bin_places: Places, slots: BinCapacity
) -> Iterator[tuple[int, int]]:
    """Yield (item, bin), as indices of `items` and `bins`, for each item that gets a slot.

    Takes all pairs of the given indices by falling score, equal scores in order of the indices.
    """
    while item_places.size and bin_places.size:
        scores = _mixed(items[item_places][:, None] ^ bins[bin_places]).ravel()
        rows, columns = divmod(_best(scores, PAIRS_PER_PLACE * (item_places.size + bin_places.size)), bin_places.size)
        placed = set()
        for item, bin_ in zip(item_places[rows].tolist(), bin_places[columns].tolist(), strict=True):
            if item not in placed and slots.take(bin_):
                yield item, bin_
                placed.add(item)
                if len(placed) == item_places.size:
                    return
        # All pairs of the remaining items and bins have lower scores than those tried so far.
        item_places = item_places[[item not in placed for item in item_places.tolist()]]
        bin_places = bin_places[[slots.has(bin_) for bin_ in bin_places.tolist()]]


def _best(scores: Hashes, count: int) -> Places:
    """Return the indices of the `count` highest scores, highest first; more if the lowest is repeated."""
    import numpy as np

    if count >= scores.size:
        return np.argsort(~scores, kind="stable")
    lowest = np.partition(scores, scores.size - count)[scores.size - count]
    best = np.flatnonzero(scores >= lowest)
    return best[np.argsort(~scores[best], kind="stable")]


def _mixed(scores: Hashes) -> Hashes:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood 2014), in place: every bit depends on all."""
    import numpy as np

    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        scores ^= scores >> np.uint64(shift)
        scores *= np.uint64(factor)
    scores ^= scores >> np.uint64(31)
    return scores
