"""Base classes of the runtime's errors; each package has its own in `errors.py`.

Errors carry their data as attributes, so callers never parse messages. The text says what was given, what is allowed
and what to do next.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import PurePath

EX_CONFIG = 78
"""Exit status (BSD's `sysexits.h`) of a process that can't work as configured, so it is not restarted.

It concerns this process only: of elastic trainers, the other instances may continue.
"""

EX_DATAERR = 65
"""Exit status of an instance if its whole job can't be trained as given, so the job is not restarted."""

EX_DRAINED = 75
"""Exit status of a teacher that was drained, BSD's EX_TEMPFAIL: it has not failed, and another takes its place."""

MOST_SHOWN = 500
"""Characters of a value that a message shows."""


class EdlError(Exception):
    """The base of this project's errors. Those with data are dataclasses, whose fields are also their `args`."""

    def __post_init__(self) -> None:
        self.args = tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]


@dataclass(eq=False, repr=False)
class SpecError(EdlError, ValueError):
    """Raised when a spec, flag or parameter has a value that is not allowed."""

    field: str
    given: object
    allowed: str

    def __str__(self) -> str:
        return f"{clipped(self.field)}: got {clipped(_shown(self.given))}, allowed is {self.allowed}"

    def of(self, kind: str, field: str) -> SpecError:
        """Return this error with the name of the struct, as "bounds", replaced by its field's, as "teachers"."""
        return SpecError(re.sub(rf"^{kind}\b", field, self.field), self.given, self.allowed)


class DamagedFileError(EdlError, ValueError):
    """Raised when a file is not what was written there: no regular one, too large, or with another checksum."""


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - a huge int, or a user's class
        return f"a value of type {type(value).__name__} that can't be shown ({type(error).__name__})"


def counted(count: int, what: str) -> str:
    """Return so many of something, as in "1 instance" or "3 teachers"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def clipped(text: str, most: int = MOST_SHOWN) -> str:
    """Return a text for a message: its first `most` characters, and how many it has."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def one_line(text: str, most: int = MOST_SHOWN) -> str:
    """Return a text of others for a line of a log: clipped, and with what can't be printed as in a Python literal."""
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape", "surrogatepass").decode()
        for sign in clipped(text, most)
    )


class BackendError(EdlError):
    """Raised when a backend can't do a request."""


@dataclass(eq=False, repr=False)
class UnexpectedError(BackendError):
    """Raised by `isolated` in place of an error that says nothing to users.

    - `what`: the one of many that could not be handled, as "TrainingJob 'mnist'".
    - `cause`: the error, and the line of code that has raised it.
    """

    what: str
    cause: str

    def __str__(self) -> str:
        return f"{self.what} can't be handled: {self.cause}"


@contextmanager
def isolated(what: str) -> Iterator[None]:
    """Make any error of the block an EdlError, so that what one of many raises is its own failure.

    Loops over what others have made, as jobs, pods and namespaces, handle each in such a block. An EdlError is raised
    as it is, anything else as UnexpectedError.
    """
    try:
        yield
    except EdlError:
        raise
    except Exception as error:
        raise UnexpectedError(what, _with_place(error)) from error


def _with_place(error: Exception) -> str:
    while isinstance(error, ExceptionGroup):  # of a TaskGroup
        error = error.exceptions[0]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {clipped(str(error))} ({PurePath(frame.filename).name}:{frame.lineno})"


@dataclass(eq=False, repr=False)
class JobLockedError(BackendError):
    """Raised when a job can't be started or stopped, because another process (`holder`) is still doing that.

    - `suspended`: whether that process is suspended, as by Ctrl-Z.
    - `waited_s`: how long this one has waited.
    """

    name: str
    holder: str
    suspended: bool
    waited_s: float

    def __str__(self) -> str:
        if self.suspended:
            state, advice = "is suspended", "resume it (`fg`, or `kill -CONT` with its id), or end it (`kill -KILL`)"
        else:
            state, advice = f"has not ended for {self.waited_s:.0f} s", "if it hangs, end it (`kill` with its id)"
        return f"{self.holder} is starting or stopping job {self.name!r} and {state}; {advice}, and try again"


def missing_library(what: str, error: ImportError, extra: str = "interop") -> SpecError:
    """Return the error for something whose libraries are not installed; `extra` has them."""
    return SpecError(what, f"without {error.name}", f"after `pip install edl-airflow[{extra}]`")
