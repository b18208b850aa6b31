"""Errors of checkpoints and of where they are kept."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from edl_runtime.errors import EdlError


class CheckpointError(EdlError):
    """Raised when a checkpoint can't be written or read."""


@dataclass(eq=False, repr=False)
class CheckpointStoreError(CheckpointError):
    """Raised when the place where checkpoints are kept can't be used: no permission, no room, nobody answers."""

    url: str
    cause: str

    def __str__(self) -> str:
        return (
            f"checkpoints can't be kept at {self.url} ({self.cause}); check that this process may read and write there "
            "and that there is room, or name another place (EDL_CHECKPOINT)"
        )


@dataclass(eq=False, repr=False)
class CheckpointHeldError(CheckpointError, ValueError):
    """Raised when a job is to keep checkpoints where another job that runs keeps its own.

    - `url`: that place. `job`: the other one, in `namespace`; `since` when it keeps them there.
    - `task`: "DAG/TASK" of Airflow that has started it, empty for no task.
    - `process`: who holds it, in words, where that is no job: `job` is empty then.
    """

    url: str
    job: str
    namespace: str
    task: str
    since: datetime
    process: str = ""

    def __str__(self) -> str:
        task = f"of the Airflow task {self.task!r}, " if self.task else ""
        who = f"job {self.job!r} ({task}in namespace {self.namespace!r})"
        stop = f"that job with `edl stop {self.job}`"
        if not self.job:
            who, stop = self.process, "that one"
        return (
            f"{who} keeps its checkpoints at {self.url} since "
            f"{self.since:%Y-%m-%d %H:%M:%S}, and two jobs would overwrite each other's there: name another place "
            f"(EDL_CHECKPOINT), stop {stop}, or start this one again when it has ended"
        )


class MissingExtraError(CheckpointStoreError):
    """Raised when checkpoints are to be kept where only an optional package can write."""

    def __init__(self, url: str, extra: str, cause: str) -> None:
        super().__init__(url, cause)
        self.args = (url, extra, cause)
        self.extra = extra

    def __str__(self) -> str:
        return f"checkpoints at {self.url} need {self.extra}: {self.cause}"


@dataclass(eq=False, repr=False)
class UnreadableCheckpointError(CheckpointError):
    """Raised when what is in a checkpoint's folder can't be loaded. `state`: what it is; `problem`: why it is that.

    If it `is_draft` it has never been finished: it is being written, or its writer has died.
    """

    state: ClassVar[str]
    is_draft = False

    url: str
    problem: str

    def __str__(self) -> str:
        return f"checkpoint {self.url} is {self.state}: {self.problem}"


class DamagedCheckpointError(UnreadableCheckpointError):
    """Raised when a checkpoint is not what was written: `problem` says which file, and how."""

    state = "damaged"


class UnfinishedCheckpointError(UnreadableCheckpointError):
    """Raised when a checkpoint has no manifest: it is a draft, or is being removed, or has lost its manifest."""

    state = "unfinished"

    def __init__(self, url: str, *, is_draft: bool) -> None:
        draft = "it has no manifest.json yet: it is being written, or its writer has died"
        other = "its manifest.json is gone: it is being removed, or somebody has taken the manifest away"
        super().__init__(url, draft if is_draft else other)
        self.is_draft = is_draft


class UnknownFormatError(UnreadableCheckpointError, ValueError):
    """Raised when another version has written a checkpoint, in a format (`found`) that is not the one `known` here."""

    state = "of an unknown format"

    def __init__(self, url: str, found: int, known: int) -> None:
        super().__init__(url, f"format {found}, this version reads format {known}")
        self.args = (url, found, known)
        self.found = found
        self.known = known

    def __str__(self) -> str:
        return (
            f"{super().__str__()}; go on with the version of edl-airflow that wrote it, or name another place "
            "(EDL_CHECKPOINT)"
        )


@dataclass(eq=False, repr=False)
class NoWholeCheckpointError(CheckpointError, ValueError):
    """Raised when all finished checkpoints at a place are damaged: a training would begin anew as if there were none.

    One that has lost its manifest is damaged, too. `first`: what is wrong with the newest of them.
    """

    url: str
    damaged: int
    first: UnreadableCheckpointError

    def __str__(self) -> str:
        return (
            f"no checkpoint at {self.url} is whole, {self.damaged} damaged: {self.first}. See "
            f"`edl checkpoints verify {self.url}`; to begin anew remove them, or name another place (EDL_CHECKPOINT); "
            "to go on bring back what is missing, as from a copy"
        )
