"""A day of one resource in the terminal: what training may use, and what the web is expected to need."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from rich.text import Text

HEIGHT = 12

TRAINING, WEB, DECLARED = "█", "░", "─"
_PARTS = " ▁▂▃▄▅▆▇█"
_STYLES = {WEB: "red", DECLARED: "yellow"}


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """Some minutes, from `start` on, in shares of the whole, 0 to 1.

    What `training` may use, what windows have `declared` for it, and what the `web` is expected to need, None where
    nobody knows.
    """

    start: datetime
    training: float
    declared: float
    web: float | None = None


def draw(columns: Sequence[Column], whole: str, now: datetime) -> list[Text]:
    """Return the lines of a picture, `HEIGHT` and a scale: training stands at the bottom, and the web hangs from above.

    `whole` is what all of it is called, and `now` is marked, a time of that day. A line is for what windows have
    declared, where it is known what the web needs.
    """
    from rich.text import Text

    lines = []
    for row in range(HEIGHT, 0, -1):
        label = {HEIGHT: whole, 1: "0"}.get(row, "")
        line = Text(f"{label:>{len(whole)}} │")
        for column in columns:
            letter = _letter(column, row)
            line.append(letter, style=_STYLES.get(letter, "green"))
        lines.append(line)
    margin = " " * (len(whole) + 1)
    lines.append(Text(margin + "└" + "".join("┴" if _full_hours(column, 3) else "─" for column in columns)))
    lines.append(Text(margin + " " + _hours(columns)))
    past = sum(column.start <= now for column in columns)
    lines.append(Text(f"{margin}{' ' * past}▲ now", style="bold"))
    return lines


def _letter(column: Column, row: int) -> str:
    """Return what is in a column from `row - 1` to `row` twelfths of the whole."""
    low = (row - 1) / HEIGHT
    if column.web is not None and row == max(1, round(column.declared * HEIGHT)):
        return DECLARED
    filled = round((column.training - low) * HEIGHT * 8)
    if filled > 0:
        return _PARTS[min(8, filled)]
    return WEB if column.web is not None and 1 - column.web < low + 0.5 / HEIGHT else " "


def _full_hours(column: Column, hours: int) -> bool:
    return column.start.minute == 0 and column.start.hour % hours == 0


def _hours(columns: Sequence[Column]) -> str:
    """Return the scale's numbers."""
    line = ""
    for number, column in enumerate(columns):
        if _full_hours(column, 3) and len(line) <= number:
            line = f"{line:<{number}}{column.start:%H}"
    return line
