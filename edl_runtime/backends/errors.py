"""Errors of backends."""

from __future__ import annotations

import re
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
    """Raised when a job can't be resized because it has ended or is ending."""

    name: str
    how: str

    def __str__(self) -> str:
        return f"{self.name!r} {self.how} and can't be resized; submit it again"


@dataclass(eq=False, repr=False)
class JobReplacedError(BackendError):
    """Raised when the job that was meant has gone, and another of its name, or another try of it, may run."""

    name: str

    def __str__(self) -> str:
        return f"{self.name!r} is not the job any more that was asked for; look at what runs now, and ask again"


@dataclass(eq=False, repr=False)
class SubmitError(BackendError):
    """Raised when a job could not be started. `lacks_right`: as its cluster does not allow it to this account."""

    name: str
    reason: str
    lacks_right: bool = False

    def __str__(self) -> str:
        return f"job {self.name!r} could not be started: {self.reason}"


@dataclass(eq=False, repr=False)
class SupervisorError(BackendError):
    """Raised when a local job's supervisor `fails`: it "does not answer", or can't be reached."""

    name: str
    fails: str

    def __str__(self) -> str:
        advice = f"end it with `edl stop {self.name}`, and submit it again"
        return f"the supervisor of {self.name!r} {self.fails}; {advice}"


@dataclass(eq=False, repr=False)
class OwnedElsewhereError(BackendError):
    """Raised when a running job or pool of that name has another owner."""

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
    """Raised by `edl run` when a job of that name is running.

    `folder`: where its instances were started, empty if each has its own.
    """

    name: str
    since: datetime
    folder: str

    def __str__(self) -> str:
        where = f" in {self.folder}" if self.folder else ""
        return (
            f"a job {self.name!r} runs{where} since {self.since:%Y-%m-%d %H:%M:%S}; follow it with "
            f"`edl logs -f {self.name}`, end it with `edl stop {self.name}`, or choose another name with --name"
        )


@dataclass(eq=False, repr=False)
class ClusterError(BackendError):
    """Raised when a Kubernetes API server refuses a request. `message` is the server's."""

    status: int
    reason: str
    message: str

    @property
    def lacks_right(self) -> bool:
        """Whether this account may not do it, as the message says; a quota is refused with the same status."""
        return self.status == 403 and "cannot" in self.message

    def __str__(self) -> str:
        hint = "; the credentials of the cluster are wrong or have expired" if self.status == 401 else ""
        if self.lacks_right:
            hint = "; deploy/role.yaml grants all that is needed, and a controller deploy/controller.yaml"
        return f"the cluster refuses the request: {self.message or self.reason}{hint}"


class ConflictError(ClusterError):
    """Raised when an object exists already, or has changed since it was read (409)."""


class ResourceVersionExpiredError(ClusterError):
    """Raised when the resourceVersion of a watch or list has expired (410 Gone): list again."""


@dataclass(eq=False, repr=False)
class ClusterUnavailableError(BackendError, ConnectionError):
    """Raised when a Kubernetes API server has not answered for a while."""

    address: str
    cause: str

    def __str__(self) -> str:
        return f"the Kubernetes API at {self.address} does not answer ({self.cause}); check the kubeconfig's server"


class BrokenStreamError(ClusterUnavailableError):
    """Raised when the connection broke while a stream was read: open it again from the last position."""


_OURS = "edl: "
"""How our processes begin the line in which they say why they end; an agent then names its instance."""

_REPEATS = re.compile(r"edl: instance \d+: its worker (exited|was killed by) |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[")
"""How lines of an agent begin that only repeat the reason. They follow the words of the process that has failed."""


def with_agents_words(reason: str, index: int, lines: Sequence[str]) -> str:
    """Return how an instance has ended, with what its agent said last, at the end of these lines of its output."""
    last = next((line for line in reversed(lines) if line.startswith(_OURS)), "")
    words = last.removeprefix(_OURS).removeprefix(f"instance {index}: ")
    return f"{reason}: {words}" if words else reason


def exception_line(lines: Sequence[str]) -> str:
    """Return the line of the last traceback that names the exception, empty without a traceback."""
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] + 1 :] if frames else ()
    return next((line for line in after if line.strip() and not line.startswith(" ")), "")


def with_cause(reason: str, last_lines: Sequence[str]) -> str:
    """Return why a job has failed, with the line of its output that says most about it."""
    best = _best_of(last_lines)
    return f"{reason}: {best}" if best and best not in reason else reason


def _best_of(lines: Sequence[str]) -> str:
    """Return the exception line of the last traceback, else the last line that says more than how a process ended."""
    last = next((line for line in reversed(lines) if not _REPEATS.match(line)), "")
    return exception_line(lines) or ("" if last.startswith(" ") else re.sub(r"^edl: (instance \d+: )?", "", last))


@dataclass(eq=False, repr=False)
class JobFailedError(EdlError):
    """Raised when a job or pool has failed. `last_lines`: the end of its log."""

    name: str
    reason: str
    last_lines: Sequence[str] = ()

    def __str__(self) -> str:
        head = f"{self.name!r} failed: {with_cause(self.reason, self.last_lines)}"
        if not self.last_lines:
            return head
        return "\n".join([head, "its last lines:", *(f"  {line}" for line in self.last_lines)])
