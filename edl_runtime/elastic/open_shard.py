"""A shard that one rank has in hand: how far it is read, and why it can't be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from edl_runtime.shards.state import Shard


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
