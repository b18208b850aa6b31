"""The end of a job's log, as much of it as a page shows."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

from edl_runtime.backends.base import LogLine

MOST_BYTES = 1_000_000
"""Of the lines that are kept, in UTF-8."""


class _Kept(NamedTuple):
    number: int
    line: LogLine
    size: int


class LogEnd:
    """Keeps the newest lines up to `most_bytes`; of what is too much, the oldest of who has written most goes."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: defaultdict[int, deque[_Kept]] = defaultdict(deque)
        self._sizes: defaultdict[int, int] = defaultdict(int)
        self._size = 0
        self._added = 0
        self.left_out = 0

    def add(self, line: LogLine) -> None:
        """Add the next line."""
        size = len(line.text.encode(errors="replace")) + 1
        self._kept[line.instance].append(_Kept(self._added, line, size))
        self._sizes[line.instance] += size
        self._size += size
        self._added += 1
        while self._size > self._most_bytes:
            most = max(self._sizes, key=self._sizes.__getitem__)
            dropped = self._kept[most].popleft().size
            self._sizes[most] -= dropped
            self._size -= dropped
            self.left_out += 1

    def lines(self) -> list[LogLine]:
        """Return what is kept, in the order in which it was added."""
        return [kept.line for kept in sorted(kept for of_one in self._kept.values() for kept in of_one)]
