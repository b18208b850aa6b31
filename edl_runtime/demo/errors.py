"""Errors of JobServer and JobClient."""

from __future__ import annotations

from dataclasses import dataclass

from edl_runtime.errors import EX_CONFIG, EX_DATAERR, EdlError
from edl_runtime.exit_status import describe_exit

PERMANENT = (EX_CONFIG, EX_DATAERR)
"""Exit statuses of scripts that would fail again."""


@dataclass(eq=False, repr=False)
class JobServerUnavailableError(EdlError, ConnectionError):
    """Raised when the JobServer does not answer."""

    url: str
    cause: str

    def __str__(self) -> str:
        return f"the JobServer {self.url} can't be reached ({self.cause}); check that it runs, and PADDLE_JOBSERVER"


@dataclass(eq=False, repr=False)
class JobServerRefusedError(EdlError):
    """Raised when the JobServer refuses a request: the token or the job's id is wrong."""

    url: str
    status: int
    cause: str

    def __str__(self) -> str:
        return (
            f"the JobServer {self.url} answered {self.status}: {self.cause}; "
            "check PADDLE_JOBSERVER, PADDLE_JOB_ID and EDL_JOB_SERVER_TOKEN"
        )


@dataclass(eq=False, repr=False)
class PodFailedError(EdlError):
    """Raised when a pod has failed for good, with its last exit status and the end of its log."""

    pod_id: str
    exit_code: int
    reason: str
    log: str
    last_lines: tuple[str, ...]

    def __str__(self) -> str:
        shown = "".join(f"\n  {line}" for line in self.last_lines)
        end = f"; the end of {self.log}:{shown}" if shown else ""
        return f"{self.pod_id} {self.reason or describe_exit(self.exit_code)}{end}"
