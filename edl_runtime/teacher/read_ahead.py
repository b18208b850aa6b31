"""What a client has sent and nobody has used yet."""

from __future__ import annotations

from string import ascii_uppercase

from edl_runtime.protocol.http import END_OF_HEAD, HEAD_LIMIT

_SIZE = 64 * 1024
_FIRST = frozenset(f"{ascii_uppercase}\r\n")


class ReadAhead:
    """A buffer that heads are cut out of. Its length is the number of bytes that wait in it."""

    def __init__(self) -> None:
        self._bytes = bytearray(_SIZE)
        self._view = memoryview(self._bytes)
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def full(self) -> bool:
        return len(self) == _SIZE

    @property
    def may_be_http(self) -> bool:
        """Whether a request may begin with the first byte: a method's letter, or the line end that some put before."""
        return not self or chr(self._bytes[self._start]) in _FIRST

    def room(self) -> memoryview:
        """Return where the next bytes go; tell `grow` how many did."""
        rest = len(self)
        if self._start:
            self._bytes[:rest] = self._bytes[self._start : self._end]
            self._start, self._end = 0, rest
        return self._view[rest:]

    def grow(self, size: int) -> None:
        self._end += size

    def clear(self) -> None:
        self._start = self._end = 0

    def take_head(self) -> bytes | None:
        """Return the next head, its empty line included, None while it is not all there."""
        end = self._bytes.find(END_OF_HEAD, self._start, min(self._end, self._start + HEAD_LIMIT))
        if end < 0:
            return None
        start, self._start = self._start, end + len(END_OF_HEAD)
        return bytes(self._view[start : self._start])

    def take_into(self, area: memoryview) -> int:
        """Move as much as there is and fits into `area`; return how many bytes."""
        size = min(len(self), len(area))
        area[:size] = self._view[self._start : self._start + size]
        self._start += size
        return size
