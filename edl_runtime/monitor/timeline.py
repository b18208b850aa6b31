"""The history of jobs and the cluster: as segments of time, as rows of a table, and as a PNG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edl_runtime.autoscale.history import HOLDS_S, HistoryPoint, ResourceUse
from edl_runtime.errors import SpecError
from edl_runtime.monitor.snapshot import NOTHING, utilisation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HISTORY_HEADINGS = ("TIME", "WINDOW", "CPU-UTILS", "GPU-UTILS", "JOBS")


class HistorySegment(msgspec.Struct, frozen=True):
    """`point` held from `start` to before `end`, in Unix seconds."""

    start: float
    end: float
    point: HistoryPoint


class StateSpan(msgspec.Struct, frozen=True):
    """A state or window, `what`, from `start` to before `end`."""

    start: float
    end: float
    what: str


def segments_of(points: Sequence[HistoryPoint], *, since: float, until: float) -> list[HistorySegment]:
    """Return the time that each point holds: until the next one, and for at most HOLDS_S."""
    ends = (*(point.at for point in points[1:]), until)
    found = (
        HistorySegment(max(point.at, since), min(end, point.at + HOLDS_S, until), point)
        for point, end in zip(points, ends, strict=False)
    )
    return [one for one in found if one.start < one.end]


def jobs_of(past: Sequence[HistorySegment]) -> list[str]:
    """Return the names of all jobs and pools, by first appearance, then by name."""
    return list(dict.fromkeys(name for one in past for name in sorted(one.point.jobs)))


def spans(past: Sequence[HistorySegment], what: Callable[[HistoryPoint], str]) -> list[StateSpan]:
    """Join adjacent segments of equal `what`. Leaves out an empty `what`, and times without a point."""
    found: list[StateSpan] = []
    for one in past:
        value = what(one.point)
        if found and found[-1].what == value and found[-1].end == one.start:
            found[-1] = StateSpan(found[-1].start, one.end, value)
        else:
            found.append(StateSpan(one.start, one.end, value))
    return [span for span in found if span.what]


def state_of(name: str) -> Callable[[HistoryPoint], str]:
    """Return a function of a job's state at a point, "" where it was absent; see `spans`."""

    def state(point: HistoryPoint) -> str:
        there = point.jobs.get(name)
        return there.state if there else ""

    return state


def history_rows(points: Sequence[HistoryPoint], *, since: float, until: float) -> list[tuple[str, ...]]:
    """Return a row for each change between `since` and `until` (Unix seconds), in this machine's time zone.

    A row holds until the next one. "(not observed)" is for times without a record.
    """
    rows: list[tuple[str, ...]] = []
    observed_until = since
    for segment in segments_of(points, since=since, until=until):
        if segment.start > observed_until:
            rows.append((_local_time(observed_until), NOTHING, NOTHING, NOTHING, "(not observed)"))
        observed_until = segment.end
        point = segment.point
        jobs = (f"{name}:{job.running if job.state == 'running' else job.state}" for name, job in point.jobs.items())
        use = (utilisation(point.use.get(resource)) for resource in ("cpu", "gpu"))
        row = (_local_time(segment.start), point.window or NOTHING, *use, "|".join(jobs) or NOTHING)
        if not rows or row[1:] != rows[-1][1:]:
            rows.append(row)
    return rows


def _local_time(at: float) -> str:
    return f"{datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M:%S}"


# The drawing

INCHES = 12.0
DOTS_PER_INCH = 120

COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#76b7b2", "#edc948", "#b07aa1", "#9c755f", "#ff9da7", "#2d3f66", "#a0cbe8",
)  # fmt: skip
RED, GREY, SHADE = "#c0392b", "#c4c4c4", "#eef1f5"
CHARTS = {"cpu": "CPUs", "gpu": "GPUs"}

LETTERS = 110
"""Letters that fit above the panels."""


def save_png(points: Sequence[HistoryPoint], file: Path, *, since: float, until: float) -> None:
    """Draw the time from `since` to `until`, in Unix seconds, as a PNG; its times are local ones.

    Raises SpecError without matplotlib, and for a file that can't be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ModuleNotFoundError as error:
        raise SpecError("--png", f"no module {error.name}", "the extra edl-airflow[plot]") from None
    figure = _figure(segments_of(points, since=since, until=until), since, until)
    FigureCanvasAgg(figure)
    try:
        figure.savefig(file, format="png", dpi=DOTS_PER_INCH)
    except OSError as error:
        raise SpecError("--png", str(file), f"a file that can be written ({error.strerror})") from error


def _figure(past: Sequence[HistorySegment], since: float, until: float) -> Figure:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure

    names = jobs_of(past)
    waited = [name for name in names if any(span.what != "running" for span in spans(past, state_of(name)))]
    charts = [name for name in CHARTS if any(one.point.use[name].total for one in past if name in one.point.use)]
    heights = [3.4, *([0.35 + 0.22 * len(waited)] if waited else []), *[1.9 for _ in charts]]
    figure = Figure(figsize=(INCHES, sum(heights) + 0.55 * len(heights) + 0.5), layout="constrained", facecolor="white")
    panels: list[Axes] = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0])
    _instances(panels[0], past, names)
    if waited:
        _waiting(panels[1], past, waited)
    for panel, name in zip(panels[-len(charts) :] if charts else [], charts, strict=True):
        _use(panel, past, name)
        if name == charts[0]:
            _legend(panel)
    _windows(panels, past, until - since)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    zone = datetime.now().astimezone().tzinfo or UTC
    locator = AutoDateLocator(tz=zone)
    panels[-1].xaxis.set_major_locator(locator)
    panels[-1].xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=zone))
    panels[-1].set_xlim(_day(since), _day(until))
    panels[-1].set_xlabel(f"time ({datetime.fromtimestamp(until).astimezone():%Z})")
    return figure


def _instances(panel: Axes, past: Sequence[HistorySegment], names: Sequence[str]) -> None:
    """Stack the running instances of all jobs."""
    from matplotlib.ticker import MaxNLocator

    below: list[float] = []
    for number, name in enumerate(names):
        times, values = _steps(past, _running(name))
        top = values if not below else [low + value for low, value in zip(below, values, strict=True)]
        colour = COLOURS[number % len(COLOURS)]
        hatch = "" if number < len(COLOURS) else "//"
        panel.fill_between(
            times, below or 0.0, top, label=name, facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0.3
        )
        below = top
    panel.set_ylabel("instances that run")
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(axis="y", color=GREY, linewidth=0.5, alpha=0.6)
    panel.set_axisbelow(True)
    if names:
        _legend(panel, reverse=True)


def _waiting(panel: Axes, past: Sequence[HistorySegment], names: Sequence[str]) -> None:
    """Draw a row for each job that was pending or suspended."""
    styles: dict[str, dict[str, Any]] = {
        "pending": {"facecolor": RED},
        "suspended": {"facecolor": "white", "edgecolor": RED, "hatch": "////"},
    }
    for number, name in enumerate(names):
        found = spans(past, state_of(name))
        for state, style in styles.items():
            bars = [(_day(span.start), _day(span.end) - _day(span.start)) for span in found if span.what == state]
            if bars:
                label = state if state not in panel.get_legend_handles_labels()[1] else ""
                panel.broken_barh(bars, (number - 0.35, 0.7), linewidth=0.0, label=label, **style)
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.5, -0.5)
    _legend(panel)


def _use(panel: Axes, past: Sequence[HistorySegment], resource: str) -> None:
    """Draw how much of a resource is reserved, and how much training may use."""

    def of(amount: Callable[[ResourceUse], float | None]) -> Callable[[HistoryPoint], float]:
        def value(point: HistoryPoint) -> float:
            found = amount(point.use[resource]) if resource in point.use else None
            return math.nan if found is None else found

        return value

    times, ours = _steps(past, of(lambda use: min(use.ours, use.reserved)))
    _, reserved = _steps(past, of(lambda use: use.reserved))
    _, total = _steps(past, of(lambda use: use.total))
    _, allowed = _steps(past, of(lambda use: use.allowed))
    panel.fill_between(times, 0.0, ours, label="jobs and pools", facecolor=COLOURS[0], alpha=0.85, linewidth=0.0)
    panel.fill_between(times, ours, reserved, label="others", facecolor=GREY, linewidth=0.0)
    panel.plot(times, total, color="black", linewidth=1.0, label="all nodes")
    if not all(map(math.isnan, allowed)):
        panel.plot(times, allowed, color=RED, linewidth=1.6, linestyle="--", label="capacity for training")
    panel.set_ylabel(CHARTS[resource])
    panel.set_ylim(bottom=0)
    panel.margins(y=0.06)


def _windows(panels: Sequence[Axes], past: Sequence[HistorySegment], shown_s: float) -> None:
    """Shade every other window, and name all but the shortest above the first panel."""
    found = spans(past, lambda point: point.window)
    names = list(dict.fromkeys(span.what for span in found))
    for span in found:
        for panel in panels:
            if names.index(span.what) % 2:
                panel.axvspan(_day(span.start), _day(span.end), facecolor=SHADE, zorder=0)
            panel.axvline(_day(span.start), color=GREY, linewidth=0.8, zorder=0.5)
        if (span.end - span.start) * LETTERS > len(span.what) * shown_s:
            middle = _day((span.start + span.end) / 2)
            panels[0].text(middle, 1.02, span.what, transform=panels[0].get_xaxis_transform(), ha="center")


def _legend(panel: Axes, *, reverse: bool = False) -> None:
    panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small", reverse=reverse)


def _running(name: str) -> Callable[[HistoryPoint], float]:
    def running(point: HistoryPoint) -> float:
        return float(point.jobs[name].running) if name in point.jobs else 0.0

    return running


def _steps(past: Sequence[HistorySegment], value: Callable[[HistoryPoint], float]) -> tuple[list[float], list[float]]:
    """Return times and values of a stepped line, broken where no point holds."""
    times: list[float] = []
    values: list[float] = []
    for one in past:
        if times and times[-1] < _day(one.start):
            times.append(times[-1])
            values.append(math.nan)
        times += [_day(one.start), _day(one.end)]
        values += [value(one.point)] * 2
    return times, values


def _day(at: float) -> float:
    """Return a time as matplotlib's: in days since 1970."""
    return at / 86400
