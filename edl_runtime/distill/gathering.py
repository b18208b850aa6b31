"""Gathers the source's items into the pieces that teachers are asked about together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

GATHERING_S = 0.002
"""More items than the least are gathered only if the source has them at once."""


class Gathering:
    """The items of one epoch that are not asked about yet; safe from any thread.

    Pieces have `least` items times a power of two, up to `most()`: few batch sizes occur then, and a new one costs a
    teacher several runs. A script that waits calls `hurry`: the source may itself wait for the script to go on.

    - `give`: takes a piece; False when no more are wanted. Pieces are given one after the other, in order.
    """

    def __init__(self, least: int, most: Callable[[], int], give: Callable[[list[Any]], bool]) -> None:
        self._least = least
        self._most = most
        self._give = give
        self._lock = threading.Lock()
        self._items: list[Any] = []
        self._begin()

    @property
    def holds_back(self) -> bool:
        """Whether it may hold back items that could be asked about."""
        return self._enough > self._least

    def add_all(self, items: Iterable[Any]) -> bool:
        """Take all items of the source; return whether all were wanted.

        What came before an error of the source is given before that is raised.
        """
        giving = False
        try:
            for item in items:
                giving = True
                if not self.add(item):
                    return False
                giving = False
            giving = True
            return self.end()
        except Exception:
            if not giving:
                self.end()
            raise

    def add(self, item: Any) -> bool:
        """Take an item of the source; return whether more are wanted."""
        with self._lock:
            self._items.append(item)
            held = len(self._items)
            late = held >= self._least and time.monotonic() - self._began > GATHERING_S
            if held < self._enough and not late:
                return True
            return self._give_pieces()

    def end(self) -> bool:
        """Give what is left; return whether more would be wanted."""
        with self._lock:
            return self._give_pieces() and (not self._items or self._give_some(len(self._items)))

    def hurry(self) -> None:
        """Give what is held back, unless another thread gives just now. Raises what `give` does."""
        if self._lock.acquire(blocking=False):
            try:
                self._give_pieces()
            finally:
                self._lock.release()

    def _begin(self) -> None:
        self._enough, self._began = whole(self._most(), self._least), time.monotonic()

    def _give_pieces(self) -> bool:
        while size := whole(len(self._items), self._least):
            if not self._give_some(size):
                return False
        self._begin()
        return True

    def _give_some(self, size: int) -> bool:
        piece, self._items = self._items[:size], self._items[size:]
        return self._give(piece)


def whole(count: int, least: int) -> int:
    """Return the largest number up to `count` that is `least` times a power of two; 0 if there is none."""
    return least << ((count // least).bit_length() - 1) if count >= least else 0
