"""Errors of students: no teacher, or samples that teachers can't be asked about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edl_runtime.errors import EdlError


class DistillError(EdlError):
    """Raised when a student can't be given its teachers' answers."""


@dataclass(eq=False, repr=False)
class NoTeacherError(DistillError):
    """Raised when no healthy teacher was there within the wait limit."""

    pool: str
    waited_s: float
    reason: str = ""

    def __str__(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        waited = f"no healthy teacher of {self.pool!r} after {self.waited_s:.0f} s{because}"
        return f"{waited}; check that teachers run: `edl pools` shows who is in a pool, with EDL_REDIS_URL as here"


@dataclass(eq=False, repr=False)
class DeadlyRequestError(DistillError):
    """Raised in place of a batch under which one teacher's predictor after another died: it would end all of them.

    - `batch`: which, in words: "batch 7" of the epoch, counted from 0.
    - `teachers`: their addresses.
    """

    batch: str
    teachers: Sequence[str]
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.batch} of the epoch is not asked again: the predictors of teachers {', '.join(self.teachers)} died "
            f"or hung while they worked on it ({self.reason}). Look for what is odd about these samples, and into the "
            "teachers' logs; a model that is merely slow needs a larger `edl teacher --hung-after`"
        )


@dataclass(eq=False, repr=False)
class NotRecordedError(DistillError, LookupError):
    """Raised when a student asks for answers that were not written to disk: `missing` of `rows` rows."""

    folder: str
    missing: int
    rows: int

    def __str__(self) -> str:
        if not self.rows:
            return f"no answers were written to {self.folder}; let a teacher answer the same script first"
        return (
            f"the answers in {self.folder} are to other inputs: {self.missing} of a request's {self.rows} rows are not "
            "among them. Answers on disk need a source that gives the same inputs each time: without augmentation, or "
            "with a fixed seed for all that is random"
        )


@dataclass(eq=False, repr=False)
class UnreadableAnswersError(DistillError, ValueError):
    """Raised for answers on disk that another version has written, or that are damaged."""

    folder: str
    problem: str

    def __str__(self) -> str:
        return (
            f"the answers in {self.folder} can't be read ({self.problem}); go on with the version of edl-airflow that "
            "wrote them, or let a teacher answer the script into another folder"
        )


@dataclass(eq=False, repr=False)
class SampleError(DistillError, ValueError):
    """Raised when the source yields something that the teachers can't be asked about."""

    field: str
    position: str
    given: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.field!r} of {self.position}: got {self.given}, the teachers take {self.allowed}"


class SampleIdError(SampleError):
    """Raised when a sample has no id that its answers could be kept by, or comes with the id of another."""

    def __init__(self, field: str, position: str, given: str) -> None:
        super().__init__(field, position, given, "an integer, text or bytes for each sample, of its own")

    def __str__(self) -> str:
        return (
            f"{self.field!r} of {self.position}: got {self.given}, a cache of answers needs {self.allowed}: the same "
            "in every epoch for the same inputs, and another for others. Augmented data can't have one; and when the "
            "data has changed, remove the cache's folder"
        )
