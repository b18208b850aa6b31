"""The base of all errors that the runtime raises on purpose; each package has its own in `errors.py`.

Errors carry their data as attributes and build their text from them, so callers never parse messages. The text
says what was given, what is allowed and what to do next.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

EX_CONFIG = 78
"""Exit status (BSD's `sysexits.h`) of a process that can never work as configured: restarting it is pointless.

It speaks for that process alone. Of an instance of elastic trainers: it gives up, and the others may go on.
"""

EX_DATAERR = 65
"""Exit status of an instance whose whole job was given what can't be trained: starting the job again is pointless."""

MOST_SHOWN = 500
"""Characters of a value that a message shows."""


class EdlError(Exception):
    """The root of this project's errors. Those with data are dataclasses, whose fields are also their `args`."""

    def __post_init__(self) -> None:
        self.args = tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]


@dataclass(eq=False, repr=False)
class SpecError(EdlError, ValueError):
    """Raised when a spec, flag or parameter has a value that is not allowed."""

    field: str
    given: object
    allowed: str

    def __str__(self) -> str:
        return f"{_clipped(self.field)}: got {_clipped(_shown(self.given))}, allowed is {self.allowed}"

    def of(self, kind: str, field: str) -> SpecError:
        """Return this error of a `kind` of struct, as "bounds", as one of the field that holds it, as "teachers"."""
        return SpecError(re.sub(rf"^{kind}\b", field, self.field), self.given, self.allowed)


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - a whole number of thousands of digits, or what a class of another's raises
        return f"a value of type {type(value).__name__} that can't be shown ({type(error).__name__})"


def _clipped(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}… ({len(text):,} characters)"


class BackendError(EdlError):
    """Raised when a backend can't do what it was asked."""


@dataclass(eq=False, repr=False)
class JobLockedError(BackendError):
    """Raised when a job can't be started or stopped, for another process that does so does not come to its end.

    - `holder`: that process, in words.
    - `suspended`: whether it is, as by Ctrl-Z.
    - `waited_s`: how long it was waited for.
    """

    name: str
    holder: str
    suspended: bool
    waited_s: float

    def __str__(self) -> str:
        if self.suspended:
            state, advice = "is suspended", "let it go on (`fg`, or `kill -CONT` with its id), or end it (`kill -KILL`)"
        else:
            state, advice = f"has not ended for {self.waited_s:.0f} s", "if it hangs, end it (`kill` with its id)"
        return f"{self.holder} starts or stops job {self.name!r} and {state}; {advice}, and try again"
