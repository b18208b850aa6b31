"""AnswerCache: the reader's option to ask about each sample only once."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from edl_runtime.distill.cache.answer_store import AnswerKey, AnswerStore, MemoryAnswerStore
from edl_runtime.errors import SpecError


class AnswerCache(msgspec.Struct, frozen=True):
    """Keep the teachers' answers, and don't ask again about a sample that has been answered.

        DistillReader(batches, inputs=["image", "label", "id"], outputs=["logits"], cache=AnswerCache("id"))

    It is for data without augmentation: **a sample of the same id must be the same sample, in every epoch.** Ids that
    several samples share are refused when they meet in a batch, and of the samples that are asked about the first 64
    and then one in sixteen are checked whenever they come again, which finds augmented images, or a label for an id,
    within a few batches (SampleError).

    - `sample_id`: the slot that names each sample: an integer, text or bytes. In a folder, ids are unique over all
      sources whose readers share it. Teachers need not take the slot.
    - `limit_mb`: megabytes that it may take, what it needs for itself included. The oldest answers are dropped first,
      so a limit that is smaller than an epoch helps little.
    - `folder`: where it is kept on a local disk, ~ being one's home, for later runs and for other readers and processes
      at the same time; without one it is in memory and goes with the reader.

    An answer is found again by model, version, outputs and normalisation. The answers of another version of a model
    of the same name are dropped as soon as a reader sees the new one; so teachers of different models that share a
    folder need names of their own (`edl teacher --name`). A reader with several pools keeps each pool's answers.

    Raises SpecError for what can't work. Trouble with the disk is logged and ends no training: what can't be kept is
    asked again.
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
        """Return where the answers about these subjects are kept. Raises SpecError."""
        limit_bytes = int(self.limit_mb * 1_000_000)
        if self.folder is None:
            return MemoryAnswerStore(limit_bytes)
        from edl_runtime.distill.cache.sqlite_store import SqliteAnswerStore  # not every Python has SQLite

        try:
            return SqliteAnswerStore(Path(self.folder).expanduser(), limit_bytes, subjects)
        except (OSError, RuntimeError) as error:  # the latter for a ~ of nobody
            raise SpecError(
                "cache.folder", os.fspath(self.folder), f"a folder that can be written to ({error})"
            ) from None
