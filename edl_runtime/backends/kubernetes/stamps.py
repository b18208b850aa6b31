"""When the lines of a pod's log were written, and how much of a log has been told. Pure.

A log that breaks off is asked for anew from a whole second on, so some of it comes twice. A line is known by the moment
that it was begun at, and one that is too long comes in parts, which are counted.

That takes moments for ascending. A runtime that stamps stdout and stderr apart may write one that is a little earlier
than the one before: no line is told twice for that, but one is lost if a log breaks off between the two.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import msgspec

_RFC_3339 = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")
_LETTERS = frozenset("0123456789-:.TZ+")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NS = 10**9


class Told(msgspec.Struct, frozen=True, order=True):
    """How much of a log has been told: all from before a moment, and so many parts of lines that were begun at it.

    `moment`: in nanoseconds since 1970, -1 before any.
    """

    moment: int = -1
    parts: int = 0

    def then(self, moment: int) -> Told:
        """Return how much it is with one more part of a line that was begun at a moment."""
        return Told(moment, self.parts + 1 if moment == self.moment else 1)

    @property
    def since(self) -> str:
        """From which second on the rest of the log has to be read; empty for all of it."""
        if self.moment < 0:
            return ""
        return f"{_EPOCH + timedelta(seconds=self.moment // _NS):%Y-%m-%dT%H:%M:%SZ}"


NOTHING = Told()


def may_begin_moment(text: str) -> bool:
    """Whether nothing is in the text but what moments are written with."""
    return _LETTERS.issuperset(text)


def moment_of(text: str) -> int | None:
    """Return a moment as RFC 3339 writes it, with any offset, in nanoseconds since 1970; None if it is none."""
    found = _RFC_3339.fullmatch(text)
    if not found:
        return None
    whole, fraction, zone = found.groups()
    try:
        second = datetime.fromisoformat(whole + zone)
    except ValueError:
        return None
    return (second - _EPOCH) // timedelta(seconds=1) * _NS + int((fraction or "").ljust(9, "0"))
