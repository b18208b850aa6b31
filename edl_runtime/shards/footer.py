"""The footer of a Parquet file, as far as it says how large a row group is.

It is read here because pyarrow's objects for it end the whole process at some damaged ones, by an exception of C++ that
nothing catches. The footer is a struct in Thrift's compact protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

MAGIC = b"PAR1"
ZSTD = 6

_ROW_GROUPS, _COLUMNS, _NUM_ROWS, _METADATA = 4, 1, 3, 3
_CODEC, _NUM_VALUES, _UNCOMPRESSED_BYTES = 4, 5, 6
"""Numbers of fields, by Parquet's own definition."""

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12


class ColumnSize(NamedTuple):
    """What a row group says of one of its columns."""

    codec: int
    values: int
    uncompressed_bytes: int


def row_groups(content: bytes) -> Iterator[tuple[int, list[ColumnSize]]]:
    """Yield of each row group how many records it has, and what its columns have.

    Raises ValueError, LookupError, TypeError or RecursionError for what is no such footer.
    """
    if content[-4:] != MAGIC:
        raise ValueError("it is no Parquet file")
    length = int.from_bytes(content[-8:-4], "little")
    if length > len(content) - 8:
        raise ValueError("its footer is longer than the file")
    for group in _Thrift(content[-8 - length : -8]).struct()[_ROW_GROUPS]:
        columns = [column[_METADATA] for column in group[_COLUMNS]]
        yield (
            group[_NUM_ROWS],
            [ColumnSize(column[_CODEC], column[_NUM_VALUES], column[_UNCOMPRESSED_BYTES]) for column in columns],
        )


class _Thrift:
    """Values of Thrift's compact protocol, one after the other. Raises as `row_groups`."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def struct(self) -> dict[int, Any]:
        """Return the fields of a struct by their numbers."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            kind = head & 15
            fields[number] = kind == _TRUE if kind in {_TRUE, _FALSE} else self._value(kind)
        return fields

    def _value(self, kind: int) -> Any:
        if kind == _STRUCT:
            return self.struct()
        if kind in {_LIST, _SET}:
            head = self._byte()
            return [self._value(head & 15) for _ in range(self._varint() if head >> 4 == 15 else head >> 4)]
        if kind == _MAP:
            size = self._varint()
            kinds = self._byte() if size else 0
            return {number: (self._value(kinds >> 4), self._value(kinds & 15)) for number in range(size)}
        if kind in {_DOUBLE, _BINARY}:
            return self._bytes(8 if kind == _DOUBLE else self._varint())
        if kind in {_TRUE, _FALSE, _BYTE}:  # the former two as elements of lists
            return self._byte()
        if _BYTE < kind < _DOUBLE:
            return self._signed()
        raise ValueError(f"its footer has a value of kind {kind}")

    def _byte(self) -> int:
        self._at += 1
        return self._content[self._at - 1]

    def _bytes(self, size: int) -> bytes:
        self._at += size
        if self._at > len(self._content):
            raise ValueError("its footer is cut")
        return self._content[self._at - size : self._at]

    def _varint(self) -> int:
        number = shift = 0
        while (byte := self._byte()) & 128:
            number |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise ValueError("its footer has a number of more than 64 bits")
        return number | byte << shift

    def _signed(self) -> int:
        number = self._varint()
        return number >> 1 ^ -(number & 1)
