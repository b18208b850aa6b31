"""Errors of checkpoints and their storage."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

import msgspec

from edl_runtime.errors import EdlError

NO_SPACE = os.strerror(errno.ENOSPC)


class CheckpointError(EdlError):
    """Raised when a checkpoint can't be written or read."""


@dataclass(eq=False, repr=False)
class CheckpointStoreError(CheckpointError):
    """Raised when a checkpoint folder can't be used: no permission, no space, or the store does not answer."""

    url: str
    cause: str

    @property
    def finding(self) -> str:
        """What is wrong, without what to do."""
        if NO_SPACE in self.cause:
            return f"no space left in {self.url}"
        return f"checkpoint folder {self.url} can't be used ({self.cause})"

    def __str__(self) -> str:
        return (
            f"checkpoint folder {self.url} can't be used ({self.cause}); check that this process may read and write "
            "there and that there is space, or use another folder (EDL_CHECKPOINT)"
        )


class FolderHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Who uses a checkpoint folder, since this Unix time: the job in `namespace`.

    - `task`: "DAG/TASK" of Airflow that started it; empty without a task.
    - `process`: the process that holds the folder, as text, if it belongs to no job; `job` is empty then.
    - `group`: of a job, the random token of its lock of the folder; else the same as `process`.
    """

    namespace: str
    job: str
    since: float
    task: str = ""
    process: str = ""
    group: str = ""


@dataclass(eq=False, repr=False)
class CheckpointHeldError(CheckpointError, ValueError):
    """Raised when another running job, or a process without a job, uses the checkpoint folder `url`."""

    url: str
    holder: FolderHolder

    def __str__(self) -> str:
        by = self.holder
        task = f"of the Airflow task {by.task!r}, " if by.task else ""
        holder, stop = by.process, "that process"
        if by.job:
            holder = f"job {by.job!r} ({task}in namespace {by.namespace!r})"
            stop = f"that job with `edl stop {by.job}`"
        since = datetime.fromtimestamp(by.since).astimezone()
        return (
            f"{holder} has used the checkpoint folder {self.url} since {since:%Y-%m-%d %H:%M:%S}, and two jobs "
            f"would overwrite each other's checkpoints: use another folder (EDL_CHECKPOINT), stop {stop}, or start "
            "this job when it has ended"
        )


@dataclass(eq=False, repr=False)
class MissingExtraError(CheckpointStoreError):
    """Raised when a URL needs an optional package."""

    extra: str

    def __str__(self) -> str:
        return f"{self.url} needs {self.extra}: {self.cause}"


@dataclass(eq=False, repr=False)
class UnreadableCheckpointError(CheckpointError):
    """Raised when a checkpoint can't be loaded; `problem` says why.

    If it `is_draft`, it was never finished: it is being written, or its writer has died.
    """

    state: ClassVar[str] = "unreadable"
    is_draft = False

    url: str
    problem: str

    @property
    def finding(self) -> str:
        """What is wrong, without what to do."""
        return f"checkpoint {self.url} is {self.state}: {self.problem}"

    def __str__(self) -> str:
        return self.finding


class DamagedCheckpointError(UnreadableCheckpointError):
    """Raised when a checkpoint differs from what was written; `problem` says which file and how."""

    state = "damaged"

    def __str__(self) -> str:
        return (
            f"{self.finding}; restore that file from a copy, or remove the checkpoint: trainings go on from the "
            "newest whole one"
        )


class UnfinishedCheckpointError(UnreadableCheckpointError):
    """Raised when a checkpoint has no manifest: it is a draft, is being removed, or has lost its manifest."""

    state = "unfinished"

    def __init__(self, url: str, *, is_draft: bool) -> None:
        draft = "it has no manifest.json yet: it is being written, or its writer has died"
        other = "its manifest.json is gone: it is being removed, or the manifest was deleted"
        super().__init__(url, draft if is_draft else other)
        self.is_draft = is_draft


class NotFiniteCheckpointError(UnreadableCheckpointError):
    """Raised when a run would continue from a checkpoint of which trained weights are NaN or infinite."""

    state = "not finite"

    def __str__(self) -> str:
        name = self.url.rpartition("/")[2]
        return f"{self.finding}; to continue from it nevertheless, set EDL_CHECKPOINT_ALLOW_NOT_FINITE={name}"


class UnknownFormatError(UnreadableCheckpointError, ValueError):
    """Raised when another version wrote a checkpoint, in a format (`found`) other than the `known` one."""

    state = "of an unknown format"

    def __init__(self, url: str, found: int, known: int) -> None:
        super().__init__(url, f"format {found}, this version reads format {known}")
        self.args = (url, found, known)
        self.found = found
        self.known = known

    def __str__(self) -> str:
        return f"{super().__str__()}; use the version of edl-airflow that wrote it, or another folder (EDL_CHECKPOINT)"


@dataclass(eq=False, repr=False)
class NoWholeCheckpointError(CheckpointError, ValueError):
    """Raised when all finished checkpoints in a folder are damaged, so that training would start from scratch.

    One that has lost its manifest counts as damaged, and so does one whose weights are not finite. `first`: the error
    of the newest.
    """

    url: str
    damaged: int
    first: UnreadableCheckpointError

    def __str__(self) -> str:
        first = str(self.first) if isinstance(self.first, NotFiniteCheckpointError) else self.first.finding
        return (
            f"no checkpoint at {self.url} is intact, {self.damaged} damaged: {first}. See "
            f"`edl checkpoints verify {self.url}`; restore the missing files from a copy, or remove the checkpoints or "
            "use another folder (EDL_CHECKPOINT) to start from scratch"
        )
