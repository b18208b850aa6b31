"""AnswerCache, the reader's option to request the answers to each sample only once."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from edl_runtime.distill.cache.answer_store import AnswerKey, AnswerStore, MemoryAnswerStore
from edl_runtime.errors import SpecError


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
