"""Lines of logs as the page shows them: text, whatever they have in them. Pure."""

from __future__ import annotations

import re

_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # a title or a link
    r"|\x1b\[[0-?]*[ -/]*[@-~]?"  # a colour or a movement
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)

MOST_CHARACTERS = 4_000
"""Of a shown line; the rest is left out."""


_DIRECTIONS = re.compile(r"[\u202a-\u202e\u2066-\u2069]")
"""Characters that change the direction of what follows, also of others' texts; letters bring their own."""


def shown_line(text: str) -> str:
    """Return a line of output as a terminal leaves it: the last state of a progress bar, without escape codes."""
    last = text.rstrip("\r").rpartition("\r")[2]
    return shown_text(_ESCAPES.sub("", last))


def shown_text(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text without what turns others' texts round, of one that is too long its beginning."""
    beginning = text if len(text) <= most else f"{text[:most]}…"
    return _DIRECTIONS.sub("", beginning)
