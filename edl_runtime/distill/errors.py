"""Errors of students: no teacher, or samples that can't be sent to teachers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edl_runtime.errors import EdlError


class DistillError(EdlError):
    """Raised when a student can't get its teachers' answers."""


@dataclass(eq=False, repr=False)
class NoTeacherError(DistillError):
    """Raised when no healthy teacher was available within the wait limit."""

    pool: str
    waited_s: float
    reason: str = ""

    def __str__(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        waited = f"no healthy teacher of {self.pool!r} after {self.waited_s:.0f} s{because}"
        return f"{waited}; check that teachers run: `edl pools` lists those in a pool, with the same EDL_REDIS_URL"


class NoPoolError(NoTeacherError):
    """Raised when nobody knew the pool within the wait limit. `reason` has those that there are."""

    def __str__(self) -> str:
        return f"waited {self.waited_s:.0f} s for pool {self.pool!r}: {self.reason}; start it, or correct its name"


@dataclass(eq=False, repr=False)
class DeadlyRequestError(DistillError):
    """Raised in place of a batch under which several teachers' predictors died: sending it again would kill them all.

    - `batch`: its name: "batch 7" of the epoch, counted from 0.
    - `teachers`: their addresses.
    """

    batch: str
    teachers: Sequence[str]
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.batch} of the epoch is not sent again: the predictors of teachers {', '.join(self.teachers)} died "
            f"or hung while they worked on it ({self.reason}). Check these samples and the teachers' logs; a model "
            "that is only slow needs a larger `edl teacher --hung-after`"
        )


@dataclass(eq=False, repr=False)
class NotRecordedError(DistillError, LookupError):
    """Raised when a student needs answers that were not recorded: `missing` of `rows` rows."""

    folder: str
    missing: int
    rows: int

    def __str__(self) -> str:
        if not self.rows:
            return f"no answers were recorded in {self.folder}; run the same script with a teacher first"
        return (
            f"the answers in {self.folder} are for other inputs: {self.missing} of a request's {self.rows} rows are "
            "not among them. Recorded answers need a source that yields the same inputs each time: without "
            "augmentation, or with a fixed seed for everything random"
        )


@dataclass(eq=False, repr=False)
class UnreadableAnswersError(DistillError, ValueError):
    """Raised for recorded answers that are damaged or of another version."""

    folder: str
    problem: str

    def __str__(self) -> str:
        return (
            f"the answers in {self.folder} can't be read ({self.problem}); use the version of edl-airflow that wrote "
            "them, or record the answers again into another folder"
        )


@dataclass(eq=False, repr=False)
class SampleError(DistillError, ValueError):
    """Raised when the source yields something that can't be sent to the teachers."""

    field: str
    position: str
    given: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.field!r} of {self.position}: got {self.given}, the teachers take {self.allowed}"


class SampleIdError(SampleError):
    """Raised when a sample has no usable id for the cache, or the id of another sample."""

    def __init__(self, field: str, position: str, given: str) -> None:
        super().__init__(field, position, given, "a unique integer, text or bytes for each sample")

    def __str__(self) -> str:
        return (
            f"{self.field!r} of {self.position}: got {self.given}, a cache of answers needs {self.allowed}: the same "
            "in every epoch for the same inputs, and another for other inputs. Augmented data can't be cached; if the "
            "data has changed, remove the cache's folder"
        )
