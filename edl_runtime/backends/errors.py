"""Errors of backends: jobs and pools that can't be started, found or changed, and clusters that refuse or are away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from edl_runtime.errors import BackendError, EdlError


@dataclass(eq=False, repr=False)
class UnknownJobError(BackendError, LookupError):
    """Raised when no job or pool of that name exists."""

    name: str
    known: Sequence[str] = ()

    def __str__(self) -> str:
        known = f"; there are: {', '.join(self.known)}" if self.known else "; there are none"
        return f"no job or pool named {self.name!r}{known}"


@dataclass(eq=False, repr=False)
class JobEndedError(BackendError):
    """Raised when a job that has ended, or ends just now, can't be resized."""

    name: str
    how: str

    def __str__(self) -> str:
        return f"{self.name!r} {self.how} and can't be resized; submit it again"


@dataclass(eq=False, repr=False)
class SubmitError(BackendError):
    """Raised when a job could not be started."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"job {self.name!r} could not be started: {self.reason}"


@dataclass(eq=False, repr=False)
class OwnedElsewhereError(BackendError):
    """Raised when a job or pool of that name runs and belongs to somebody else."""

    name: str
    kind: str
    owner: str

    def __str__(self) -> str:
        what = "pool" if self.kind == "pool" else "job"
        return (
            f"{what} {self.name!r} belongs to {self.owner!r} and is running; "
            f"give each its own name, or stop that one with `edl stop {self.name}`"
        )


@dataclass(eq=False, repr=False)
class JobRunsError(BackendError):
    """Raised when a job is to be run by hand while one of its name runs.

    `folder`: in which its instances were started, empty for one of each's own.
    """

    name: str
    since: datetime
    folder: str

    def __str__(self) -> str:
        where = f" in {self.folder}" if self.folder else ""
        return (
            f"a job {self.name!r} runs{where} since {self.since:%Y-%m-%d %H:%M:%S}; "
            f"`edl logs -f {self.name}` shows what it writes, `edl stop {self.name}` ends it, and --name gives this "
            "one another name"
        )


@dataclass(eq=False, repr=False)
class ClusterError(BackendError):
    """Raised when a Kubernetes API server refuses a request. `message` is its own, and names what is wrong."""

    status: int
    reason: str
    message: str

    def __str__(self) -> str:
        hint = {
            401: "; the credentials of the cluster are wrong or have expired",
            403: "; the role in deploy/ has all verbs that are needed" if "cannot" in self.message else "",
        }.get(self.status, "")
        return f"the cluster refuses it: {self.message or self.reason}{hint}"


class ConflictError(ClusterError):
    """Raised when an object in a cluster is another one than the request took it for, or is there already."""


class ResourceVersionExpiredError(ClusterError):
    """Raised when a watch or a list of a cluster would go on in a past that the server has forgotten: list anew."""


@dataclass(eq=False, repr=False)
class ClusterUnavailableError(BackendError, ConnectionError):
    """Raised when a Kubernetes API server does not answer, for a while."""

    address: str
    cause: str

    def __str__(self) -> str:
        return f"the Kubernetes API at {self.address} does not answer ({self.cause}); check the kubeconfig's server"


class BrokenStreamError(ClusterUnavailableError):
    """Raised when the connection to a cluster broke while something was read bit by bit: go on from where that was."""


def _best_of(lines: Sequence[str]) -> str:
    """Return the line that says most: what a traceback ends with, else the last."""
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] + 1 :] if frames else lines[-1:]
    return next((line for line in after if line.strip() and not line.startswith(" ")), "")


@dataclass(eq=False, repr=False)
class JobFailedError(EdlError):
    """Raised when a job or pool ended in failure. `last_lines` are the last lines of its log."""

    name: str
    reason: str
    last_lines: Sequence[str] = ()

    def __str__(self) -> str:
        best = _best_of(self.last_lines)
        head = f"{self.name!r} failed: {self.reason}" + (f": {best}" if best and best not in self.reason else "")
        if not self.last_lines:
            return head
        return "\n".join([head, "its last lines:", *(f"  {line}" for line in self.last_lines)])
