"""Stores of answers: the interface, and the one in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from edl_runtime.log import get_logger

ENTRY_BYTES = 200
"""Memory overhead of an entry (measured: 170 to 230)."""

log = get_logger(__name__)


class AnswerKey(NamedTuple):
    """What entries belong to: a version of a model, and a `digest` of what is requested from it."""

    model: str
    version: str
    digest: bytes


class AnswerStore(Protocol):
    """Stores entries by subject and sample id, up to a number of bytes; the oldest are dropped first.

    Every method is safe from any thread, and none raises for a broken disk: entries that can't be read are not found,
    and those that can't be written are not stored.
    """

    def find(self, subject: AnswerKey, ids: Sequence[bytes]) -> list[bytes | None]:
        """Return the entry of each id, None for those not found."""

    def keep(self, subject: AnswerKey, entries: Mapping[bytes, bytes]) -> None:
        """Store these by id; they replace earlier ones."""

    def close(self) -> None:
        """Free its resources; from then on it finds and stores nothing."""


class MemoryAnswerStore:
    """Stores entries in this process's memory."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0
        self._full = False

    def find(self, subject: AnswerKey, ids: Sequence[bytes]) -> list[bytes | None]:
        about, get = subject.digest, self._entries.get
        with self._lock:
            return [get(about + name) for name in ids]

    def keep(self, subject: AnswerKey, entries: Mapping[bytes, bytes]) -> None:
        with self._lock:
            for name, entry in entries.items():
                key = subject.digest + name
                earlier = self._entries.pop(key, None)
                if earlier is not None:
                    self._bytes -= _size(key, earlier)
                self._entries[key] = entry
                self._bytes += _size(key, entry)
            while self._bytes > self._limit_bytes:
                self._bytes -= _size(*self._entries.popitem(last=False))
                if not self._full:
                    self._full = True
                    log_filled(self._limit_bytes)

    def close(self) -> None:
        with self._lock:
            self._entries = OrderedDict()
            self._limit_bytes = self._bytes = 0


def log_filled(limit_bytes: int) -> None:
    hint = "the oldest answers are dropped; if an epoch does not fit, few are found again: raise limit_mb"
    log.warning("cache.filled", limit_mb=limit_bytes / 1_000_000, hint=hint)


def _size(key: bytes, entry: bytes) -> int:
    return ENTRY_BYTES + len(key) + len(entry)
