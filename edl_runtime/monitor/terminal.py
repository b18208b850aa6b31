"""Prints a snapshot on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING

from edl_runtime.autoscale.history import ResourceUse
from edl_runtime.monitor.reports import format_duration
from edl_runtime.monitor.snapshot import HEADINGS, NOTHING, JobLine, MonitorSnapshot, PoolLine, summary_row
from edl_runtime.pods import format_amount

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def picture(seen: MonitorSnapshot) -> RenderableType:
    """Return tables of the summary, resources, pools, jobs with their targets and reasons, and how these train."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_table(HEADINGS, [summary_row(seen)])]
    if seen.use:
        parts += ["", _table(_RESOURCES, [_resource(name, use) for name, use in sorted(seen.use.items()) if use.total])]
    if seen.pools:
        parts += ["", _table(_POOLS, map(_pool, seen.pools))]
    if seen.jobs:
        parts += ["", _table(_JOBS, map(_job, seen.jobs))]
    if training := [job for job in seen.jobs if job.progress]:
        parts += ["", _table(_TRAINING, (_training(job, seen.at) for job in training))]
    lines = filter(None, [_plan_line(seen), seen.why, *seen.notes, *seen.lacks])
    return Group(*parts, "", *map(Text, lines))


def print_picture(seen: MonitorSnapshot) -> None:
    """Print the tables, as wide as they need."""
    from rich.console import Console

    console = Console()
    console.width = max(console.width, Console(width=2**16).measure(picture(seen)).maximum)
    console.print(picture(seen))


@contextmanager
def live() -> Iterator[Callable[[MonitorSnapshot], None]]:
    """Give a function that replaces the snapshot on screen."""
    from rich.live import Live

    with Live(auto_refresh=False, vertical_overflow="ellipsis") as shown:
        yield lambda seen: shown.update(picture(seen), refresh=True)


_RESOURCES = ("RESOURCE", "RESERVED", "BY-JOBS", "FOR-TRAINING", "TOTAL")
_POOLS = ("POOL", "TEACHERS", "REGISTERED", "STUDENTS", "BUSY", "WAITING", "QUARANTINED", "LIMIT")
_JOBS = ("NAME", "KIND", "STATE", "INSTANCES", "BOUNDS", "TARGET", "REASON")
_TRAINING = ("NAME", "STEP", "DONE", "LEFT", "SAMPLES/S", "LOSS", "CHECKPOINT", "RESIZED", "LIMIT")


def _resource(name: str, use: ResourceUse) -> tuple[str, ...]:
    amounts = (use.reserved, use.ours, use.allowed, use.total)
    return (name, *(NOTHING if amount is None else format_amount(amount, name) for amount in amounts))


def _pool(pool: PoolLine) -> tuple[str, ...]:
    instances = NOTHING if pool.wanted is None else f"{pool.running}/{pool.wanted}"
    counts = (NOTHING if count is None else str(count) for count in (pool.teachers, pool.students))
    shares = (NOTHING if share is None else f"{100 * share:.0f}%" for share in (pool.busy, pool.waiting))
    quarantined = str(sum(bool(teacher.quarantine) for teacher in pool.members)) if pool.members else NOTHING
    return (pool.name, instances, *counts, *shares, quarantined, pool.limit)


def _job(job: JobLine) -> tuple[str, ...]:
    target = NOTHING if job.target is None else str(job.target)
    bounds = f"{job.bounds.min}-{job.bounds.max}" if job.bounds else NOTHING
    reason = " · ".join(filter(None, [job.reason, job.trouble]))
    return (job.name, job.kind, job.state, f"{job.running}/{job.wanted}", bounds, target, reason)


def _training(job: JobLine, now: float) -> tuple[str, ...]:
    progress, saved, resize = job.progress, job.checkpoint, job.resize
    assert progress  # noqa: S101 - others are not shown here
    left = progress.time_left_s
    pause = "" if resize is None or resize.pause_s is None else f" in {resize.pause_s:.2f} s"
    return (
        job.name,
        str(progress.step),
        NOTHING if job.share is None else f"{100 * job.share:.0f}%",
        NOTHING if left is None else format_duration(left),
        f"{progress.samples_per_s:,.0f}",
        NOTHING if progress.loss is None else f"{progress.loss:.4g}",
        f"{saved.step}, {format_duration(now - saved.at)} ago" if saved else NOTHING,
        f"{resize.before}→{resize.after}{pause}" if resize else NOTHING,
        progress.limit or NOTHING,
    )


def _plan_line(seen: MonitorSnapshot) -> str:
    if seen.planned_at is None:
        return "" if seen.lacks else "targets: nothing rescales"
    until = f" until {_clock(seen.until, seen.at)}" if seen.until else ""
    window = f", window {seen.window!r}{until}" if seen.window else ""
    return f"targets of {_clock(seen.planned_at, seen.at)}{window}"


def _clock(at: float, now: float) -> str:
    """Return a local time, with its weekday if it is not of today."""
    moment, today = (datetime.fromtimestamp(each).astimezone() for each in (at, now))
    return f"{moment:%H:%M:%S}" if moment.date() == today.date() else f"{moment:%a %H:%M}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=None, pad_edge=False)
    for each in rows:
        table.add_row(*map(Text, each))
    return table
