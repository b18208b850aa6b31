"""AnswerCache, the reader's option to request the answers to each sample only once, and its store in memory."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.log import get_logger

ENTRY_BYTES = 200
"""Memory overhead of an entry (measured: 170 to 230)."""

log = get_logger(__name__)


class AnswerCache(msgspec.Struct, frozen=True):
    """Stores the teachers' answers, so that each sample is sent only once.

        DistillReader(batches, inputs=["image", "label", "id"], outputs=["logits"], cache=AnswerCache("id"))

    It is for data without augmentation: **a sample of the same id must be the same sample, in every epoch.** Ids that
    several samples of a batch share are refused, and the first 64 samples sent, then one in sixteen, are compared
    whenever their ids come again, which detects augmented images, or a label as id, within a few batches (SampleError).

    - `sample_id`: the slot that names each sample: an integer, text or bytes. In a folder, ids are unique over all
      sources whose readers share it. Teachers need not take the slot.
    - `limit_mb`: its size limit in megabytes, overhead included. The oldest answers are dropped first, so a limit that
      is smaller than an epoch helps little.
    - `folder`: stores it on a local disk (~ is the home folder) for later runs and for other readers and processes at
      the same time; by default it is in memory and ends with the reader.

    Answers belong to a model, its version, outputs and normalisation. Those of another version of a model of the same
    name are dropped as soon as a reader sees the new one, so teachers of different models that share a folder need
    different names (`edl teacher --name`). A reader with several pools caches each pool's answers.

    Raises SpecError for invalid arguments. Disk errors are logged and end no training: answers that can't be stored are
    requested again.
    """

    sample_id: str
    limit_mb: float = 256
    folder: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sample_id, str) or not self.sample_id:
            raise SpecError("cache.sample_id", self.sample_id, "the name of a slot, one of `inputs`")
        limit: object = self.limit_mb
        if isinstance(limit, bool) or not (isinstance(limit, int | float) and 0 < limit < math.inf):
            raise SpecError("cache.limit_mb", limit, "a number of megabytes above 0")
        folder: object = self.folder
        if folder is not None and not (isinstance(folder, str | os.PathLike) and os.fspath(folder)):
            raise SpecError("cache.folder", folder, "a folder, or None to keep answers in memory")

    def open(self, subjects: Collection[AnswerKey]) -> AnswerStore:
        """Return a store for these subjects. Raises SpecError."""
        limit_bytes = int(self.limit_mb * 1_000_000)
        if self.folder is None:
            return MemoryAnswerStore(limit_bytes)
        from edl_runtime.distill.cache.sqlite_store import SqliteAnswerStore  # not every Python has SQLite

        try:
            return SqliteAnswerStore(Path(self.folder).expanduser(), limit_bytes, subjects)
        except (OSError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
            raise SpecError(
                "cache.folder", os.fspath(self.folder), f"a folder that can be written to ({error})"
            ) from None


# The stores of answers: the interface, and the one in memory


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
