"""The state of a training from the rank that has it to those that have not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from edl_runtime.checkpoint.snapshot import Snapshot
from edl_runtime.elastic.groups import Group

SMALL = 1 << 20
"""Bytes: arrays below travel together, for each message has its price."""


class _Array(msgspec.Struct, frozen=True):
    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


class _Head(msgspec.Struct, frozen=True):
    snapshot: Snapshot  # without its arrays
    arrays: list[_Array]


def source_of(steps: Sequence[int | None]) -> int | None:
    """Return the first rank of those whose state the others take; None when all have the same already.

    Survivors of a lost rank differ by a step at most; who is ahead has applied what the others have not.
    """
    live = [step for step in steps if step is not None]
    if not live:
        return 0
    return None if len(set(steps)) == 1 else steps.index(max(live))


def takers_of(steps: Sequence[int | None], source: int) -> list[int]:
    """Return the ranks that have another state than the source, by rank."""
    return [rank for rank, step in enumerate(steps) if rank != source and (step is None or step != steps[source])]


def share(group: Group, source: int, takers: Sequence[int], snapshot: Snapshot | None) -> Snapshot:
    """Return the source's snapshot on it and on each taker: the source gives it. Raises GroupLostError."""
    if group.rank == source:
        assert snapshot is not None  # noqa: S101 -- the source has it
        if takers:
            _send(group, source, takers, snapshot)
        return snapshot
    return _receive(group, source, takers)


def _send(group: Group, source: int, takers: Sequence[int], snapshot: Snapshot) -> None:
    arrays = [
        _Array(kind, name, array.dtype.str, array.shape)
        for kind, held in snapshot.arrays.items()
        for name, array in held.items()
    ]
    content = msgspec.json.encode(_Head(msgspec.structs.replace(snapshot, arrays={}), arrays))
    head = np.frombuffer(content, np.uint8)
    group.give(np.array([len(head)], np.int64).view(np.uint8), source, takers)
    group.give(head, source, takers)
    for batch in _batches(arrays):
        parts = [_bytes(snapshot.arrays[each.group][each.name]) for each in batch]
        group.give(parts[0] if len(parts) == 1 else np.concatenate(parts), source, takers)


def _receive(group: Group, source: int, takers: Sequence[int]) -> Snapshot:
    size = np.zeros(1, np.int64)
    group.give(size.view(np.uint8), source, takers)
    content = np.empty(int(size[0]), np.uint8)
    group.give(content, source, takers)
    head = msgspec.json.decode(content.tobytes(), type=_Head)
    found: dict[str, dict[str, np.ndarray]] = {each.group: {} for each in head.arrays}
    for empty in (each for each in head.arrays if not each.nbytes):
        found[empty.group][empty.name] = np.empty(empty.shape, empty.dtype)
    for batch in _batches(head.arrays):
        room = np.empty(sum(each.nbytes for each in batch), np.uint8)
        group.give(room, source, takers)
        start = 0
        for each in batch:
            part = room[start : start + each.nbytes]
            found[each.group][each.name] = part.view(each.dtype).reshape(each.shape)
            start += each.nbytes
    return msgspec.structs.replace(head.snapshot, arrays=found)


def _batches(arrays: Sequence[_Array]) -> Iterator[list[_Array]]:
    """Yield what travels in one message: a large array, or small ones together."""
    small: list[_Array] = []
    for each in arrays:
        if not each.nbytes:
            continue
        if each.nbytes >= SMALL:
            yield [each]
            continue
        small.append(each)
        if sum(one.nbytes for one in small) >= SMALL:
            yield small
            small = []
    if small:
        yield small


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
