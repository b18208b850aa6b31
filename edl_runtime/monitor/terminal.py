"""Draws a snapshot and the history on a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from edl_runtime.autoscale.history import HistoryPoint, ResourceUse
from edl_runtime.monitor.snapshot import HEADINGS, NOTHING, UNITS, JobLine, MonitorSnapshot, PoolLine, summary_row
from edl_runtime.monitor.timeline import Cell, columns, jobs_of, segments_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

CHART_ROWS = 6
"""Lines of text that a resource's chart is high."""

LEAST_COLUMNS = 20
MOST_COLUMNS = 240
TICK_COLUMNS = 12
"""Columns of the time's axis that a label needs, with room around it."""

TICKS_S = (10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Times that may lie between two labels."""

CHARTS = ("cpu", "gpu")
EIGHTHS = " ▁▂▃▄▅▆▇█"
OTHERS, LINE, PENDING, SUSPENDED = "░", "━", "•", "z"
COLOURS = ("cyan", "green", "yellow", "blue", "magenta", "bright_cyan", "bright_green", "bright_blue")


def draw_history(points: Sequence[HistoryPoint], *, since: float, until: float, width: int) -> Text:
    """Return the time from `since` to `until`, in Unix seconds, in so many letters a line; times are local ones."""
    from rich.text import Text

    past = segments_of(points, since=since, until=until)
    names = jobs_of(past)
    margin = max(8, *map(len, names), 0) + 6
    count = min(MOST_COLUMNS, max(LEAST_COLUMNS, width - margin - 6))
    cut = columns(past, since=since, until=until, count=count)
    lines = [Text(f"{'window':<{margin}}").append_text(_band(cut.windows))] if any(cut.windows) else []
    for resource in CHARTS:
        uses = cut.use.get(resource, [])
        if any(use and use.total for use in uses):
            lines += _chart(resource, uses, margin)
    for number, name in enumerate(names):
        cells = cut.cells[name]
        most = max((cell.running for cell in cells if cell), default=0.0)
        row = Text(f"{name:<{margin - 6}} {most:>4.0f}│").append_text(_row(cells, most, COLOURS[number % len(COLOURS)]))
        lines.append(row.append(f" {_last(cells):>4}"))
    lines += [Text(" " * margin + line, style="dim") for line in _axis(since, until, count)]
    lines.append(Text(_legend(cut.use), style="dim"))
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def _band(windows: Sequence[str]) -> Text:
    """Return each window's name where it begins, and how long it lasts."""
    from rich.text import Text

    band = Text()
    start = 0
    for end in range(1, len(windows) + 1):
        if end == len(windows) or windows[end] != windows[start]:
            room = end - start
            name = windows[start]
            said = f"├{name[: room - 1]:─<{room - 1}}" if name else " " * room
            band.append(said, style="bold")
            start = end
    return band


def _chart(resource: str, uses: Sequence[ResourceUse | None], margin: int) -> Iterator[Text]:
    """Return how much of a resource jobs and pools, and others, reserve, below the line of what training may use."""
    from rich.text import Text

    for row in reversed(range(CHART_ROWS)):
        label = f"{resource} 100%" if row == CHART_ROWS - 1 else "0%" if row == 0 else ""
        line = Text(f"{label:>{margin - 1}}│")
        for use in uses:
            line.append(*_point(use, row))
        yield line


def _point(use: ResourceUse | None, row: int) -> tuple[str, str]:
    """Return letter and style of a chart's place, rows counted from below."""
    if use is None or not use.total:
        return " ", ""
    ours, reserved = (CHART_ROWS * amount / use.total - row for amount in (use.ours, use.reserved))
    if use.allowed is not None:
        level = min(CHART_ROWS * use.allowed / use.total, CHART_ROWS - 0.01)
        if math.floor(level) == row:
            return LINE, "bold red"
    if ours >= 1 / 16 and (ours >= reserved - 1 / 2 or ours >= 1):
        return EIGHTHS[min(8, max(1, round(8 * ours)))], "cyan"
    if reserved >= 1 / 2:
        return OTHERS, "dim"
    return " ", ""


def _row(cells: Sequence[Cell | None], most: float, colour: str) -> Text:
    """Return a job's instances over time: the higher the more, full for the most that it had."""
    from rich.text import Text

    line = Text()
    for cell in cells:
        if cell is None:
            line.append(" ")
        elif cell.state == "pending":
            line.append(PENDING, style="bold red")
        elif cell.state == "suspended":
            line.append(SUSPENDED, style="bold red")
        else:
            line.append(EIGHTHS[min(8, max(1, round(8 * cell.running / most)))] if most else EIGHTHS[1], style=colour)
    return line


def _last(cells: Sequence[Cell | None]) -> str:
    """Return how many instances there were in the last column, empty if there was no such job."""
    last = cells[-1]
    return "" if last is None else f"{last.running:.0f}"


def _axis(since: float, until: float, count: int) -> tuple[str, str]:
    """Return the axis of times, and what stands below it."""
    marks, labels = ["─"] * count, [" "] * (count + TICK_COLUMNS)
    ticks = list(_ticks(since, until, count))
    told = _time_format(until - since, [moment for moment, _ in ticks])
    for moment, column in ticks:
        marks[column] = "┴"
        said = f"{moment:{told}}"
        labels[column : column + len(said)] = said
    return "".join(marks), "".join(labels).rstrip()


def _time_format(span_s: float, moments: Sequence[datetime]) -> str:
    """Return how to write times so that none of such a span reads like another."""
    if span_s > 7 * 86400:
        return "%d %b"
    if span_s > 86400:
        return "%a %H:%M"
    return "%H:%M:%S" if any(moment.second for moment in moments) else "%H:%M"


def _ticks(since: float, until: float, count: int) -> Iterator[tuple[datetime, int]]:
    """Yield the labelled times, whole ones of the local clock, and their columns."""
    fewest = (until - since) * TICK_COLUMNS / count
    step_s = next((step for step in TICKS_S if step >= fewest), TICKS_S[-1] * math.ceil(fewest / TICKS_S[-1]))
    first = datetime.fromtimestamp(since).astimezone()
    midnight = first.replace(hour=0, minute=0, second=0, microsecond=0)
    passed = math.ceil((first - midnight).total_seconds() / step_s)
    moment = midnight + timedelta(seconds=passed * step_s)
    while moment.timestamp() < until:
        yield moment, min(count - 1, int((moment.timestamp() - since) / (until - since) * count))
        moment += timedelta(seconds=step_s)


def _legend(uses: dict[str, list[ResourceUse | None]]) -> str:
    known = [use for resource in CHARTS for use in uses.get(resource, []) if use]
    words = [
        f"{EIGHTHS[-1]} jobs and pools" if known else "",
        f"{OTHERS} others" if known else "",
        f"{LINE} capacity for training" if any(use.allowed is not None for use in known) else "",
        f"{PENDING} pending",
        f"{SUSPENDED} suspended",
    ]
    return "   ".join(filter(None, words))


# What was seen, on a terminal.


def picture(seen: MonitorSnapshot) -> RenderableType:
    """Return all of it: the tutorial's columns, what nodes have, pools, then jobs with their targets and reasons."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_table(HEADINGS, [summary_row(seen)])]
    if seen.use:
        parts += ["", _table(_RESOURCES, [_resource(name, use) for name, use in sorted(seen.use.items()) if use.total])]
    if seen.pools:
        parts += ["", _table(_POOLS, map(_pool, seen.pools))]
    if seen.jobs:
        parts += ["", _table(_JOBS, map(_job, seen.jobs))]
    said = filter(None, [_said_of_plan(seen), seen.why, *seen.notes, *seen.lacks])
    return Group(*parts, "", *(Text(line) for line in said))


def print_picture(seen: MonitorSnapshot) -> None:
    """Print all of it, nothing cut off."""
    from rich.console import Console

    console = Console()
    console.width = max(console.width, Console(width=2**16).measure(picture(seen)).maximum)
    console.print(picture(seen))


def print_past(points: Sequence[HistoryPoint], *, since: float, until: float) -> None:
    """Draw the past as wide as the terminal is; see `draw_history`."""
    from rich.console import Console

    console = Console()
    console.print(draw_history(points, since=since, until=until, width=console.width), soft_wrap=True)


@contextmanager
def live() -> Iterator[Callable[[MonitorSnapshot], None]]:
    """Give what shows something in place of what was shown before."""
    from rich.live import Live

    with Live(auto_refresh=False, vertical_overflow="ellipsis") as shown:
        yield lambda seen: shown.update(picture(seen), refresh=True)


_RESOURCES = ("RESOURCE", "RESERVED", "BY-JOBS", "FOR-TRAINING", "TOTAL")
_POOLS = ("POOL", "TEACHERS", "REGISTERED", "STUDENTS", "BUSY", "WAITING")
_JOBS = ("NAME", "KIND", "STATE", "INSTANCES", "TARGET", "REASON")


def _resource(name: str, use: ResourceUse) -> tuple[str, ...]:
    amounts = (use.reserved, use.ours, use.allowed, use.total)
    return (name, *(NOTHING if amount is None else _amount(name, amount) for amount in amounts))


def _amount(resource: str, amount: float) -> str:
    return f"{amount / 2**30:,.2f} GiB" if UNITS.get(resource) == "bytes" else f"{amount:.6g}"


def _pool(pool: PoolLine) -> tuple[str, ...]:
    instances = NOTHING if pool.wanted is None else f"{pool.running}/{pool.wanted}"
    counts = (NOTHING if count is None else str(count) for count in (pool.teachers, pool.students))
    shares = (NOTHING if share is None else f"{100 * share:.0f}%" for share in (pool.busy, pool.waiting))
    return (pool.name, instances, *counts, *shares)


def _job(job: JobLine) -> tuple[str, ...]:
    target = NOTHING if job.target is None else str(job.target)
    reason = " · ".join(filter(None, [job.reason, job.trouble]))
    return (job.name, job.kind, job.state, f"{job.running}/{job.wanted}", target, reason)


def _said_of_plan(seen: MonitorSnapshot) -> str:
    if seen.planned_at is None:
        return "" if seen.lacks else "targets: nobody rescales"
    until = f" until {_clock(seen.until, seen.at)}" if seen.until else ""
    window = f", window {seen.window!r}{until}" if seen.window else ""
    return f"targets of {_clock(seen.planned_at, seen.at)}{window}"


def _clock(at: float, now: float) -> str:
    """Return a time of this machine's zone, with its day if that is another one."""
    moment, today = (datetime.fromtimestamp(each).astimezone() for each in (at, now))
    return f"{moment:%H:%M:%S}" if moment.date() == today.date() else f"{moment:%a %H:%M}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=None, pad_edge=False)
    for each in rows:
        table.add_row(*map(Text, each))
    return table
