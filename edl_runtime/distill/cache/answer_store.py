"""Where a cache keeps its answers: the interface of a store, and the one in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from edl_runtime.log import get_logger

ENTRY_BYTES = 200
"""What an entry takes in memory besides its own bytes (measured: 170 to 230)."""

log = get_logger(__name__)


class AnswerKey(NamedTuple):
    """What entries are about: a model in one version, and what is asked of it, which `digest` stands for."""

    model: str
    version: str
    digest: bytes


class AnswerStore(Protocol):
    """Keeps entries, each by its subject and a sample's id, up to a number of bytes; the oldest go first.

    Every method is safe from any thread, and none raises for what is wrong with the place: what can't be read is not
    known, and what can't be written is not kept.
    """

    def find(self, subject: AnswerKey, ids: Sequence[bytes]) -> list[bytes | None]:
        """Return the entry of each, None for those that are not known."""

    def keep(self, subject: AnswerKey, entries: Mapping[bytes, bytes]) -> None:
        """Keep these, by id, in the place of earlier ones."""

    def close(self) -> None:
        """Free what it uses; from then on nothing is known nor kept."""


class MemoryAnswerStore:
    """Keeps entries in this process's memory."""

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
                    log_full(self._limit_bytes)

    def close(self) -> None:
        with self._lock:
            self._entries = OrderedDict()
            self._limit_bytes = self._bytes = 0


def log_full(limit_bytes: int) -> None:
    """Log that from now on entries are dropped."""
    hint = "the oldest answers are dropped; if an epoch does not fit, few are found again: raise limit_mb"
    log.warning("cache.full", limit_mb=limit_bytes / 1_000_000, hint=hint)


def _size(key: bytes, entry: bytes) -> int:
    return ENTRY_BYTES + len(key) + len(entry)
