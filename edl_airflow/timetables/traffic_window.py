"""A schedule that follows traffic windows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import pendulum
from airflow.timetables.base import DagRunInfo, DataInterval, TimeRestriction, Timetable

from edl_airflow.traffic_windows import (
    Windows,
    caller_folder,
    check_window,
    describe_days,
    describe_sizes,
    load_windows,
    sizes_by_name,
    windows_to_data,
)
from edl_runtime.autoscale.traffic.windows import DAY_MINUTES, FARTHEST, TrafficWindows, WindowSpan, format_clock
from edl_runtime.errors import SpecError

STILL_AT_ONCE = timedelta(minutes=1)
"""How long ago the first window of a DAG may have begun: schedulers are late."""

DESCRIPTION_LIMIT = 900
"""Longest description: Airflow's database takes 1000 characters, and Airflow may add a prefix."""


class TrafficWindowTimetable(Timetable):
    """A run at the start of each traffic window; its data interval is the window, from start to end.

    So, unlike with other timetables, a run starts at the start of its interval. A window that is interrupted, by
    another one or by the hour that repeats in autumn, has a run each time that it begins. A window of more than 400
    days has an interval of 400 days. Without catchup, too, the current window has its run when the DAG is switched on,
    unless it had one. Changed windows count from the next start on, or at once if the current window began after the
    last run.

    It is for tasks that run once in a window, as a nightly training. Rescaling has to run often, and before a window
    that leaves less to training; see the schedule of `edl_rescale_by_traffic`.

    Windows, also in a Variable, are read when the DAG file is parsed, and stored as plain data. Raises SpecError for
    mistakes in the windows, for unknown names, and if no window begins within 400 days.

    :param windows: traffic windows, as a mapping, a Path of a YAML file (a relative one starts from the DAG's file),
        "variable:NAME", or a text
    :param only: names of the windows that have runs, "default" for the times between windows; None for all
    :param run_immediately: whether a new DAG starts with the current window; False: with the next one
    """

    def __init__(
        self, windows: Windows, only: Sequence[str] | str | None = None, *, run_immediately: bool = True
    ) -> None:
        self.windows = load_windows(windows, folder=caller_folder())
        if only is not None and not isinstance(only, str | list | tuple):
            raise SpecError("only", only, "names of windows, as in ['night'], or None for all")
        self.only = None if only is None else tuple([only] if isinstance(only, str) else only)
        if not isinstance(run_immediately, bool):
            raise SpecError("run_immediately", run_immediately, "True or False")
        self.run_immediately = run_immediately
        for name in self.only or ():
            check_window(self.windows, name, field="only")
        if self.only == ():
            raise SpecError("only", self.only, "names of windows, or None for all")
        self.description = _description(self.windows, self._names)

    @property
    def summary(self) -> str:
        """The times and sizes, for the UI."""
        sizes = sizes_by_name(self.windows)
        parts = ", ".join(f"{name} ({describe_sizes(sizes[name])})" for name in self._names)
        return f"at {', '.join(_times(self.windows, self._names))} {self.windows.time_zone}: {parts}"

    def validate(self) -> None:
        now = _now()
        if not self._takes(self.windows.at(now)) and not self._next(now):
            names = ", ".join(map(repr, self._names)) or "none"
            raise SpecError("windows", names, f"windows of which one begins within {FARTHEST.days} days")

    def next_dagrun_info(
        self, *, last_automated_data_interval: DataInterval | None, restriction: TimeRestriction
    ) -> DagRunInfo | None:
        """Return the run of the current or next window; None if there is none within 400 days."""
        last = last_automated_data_interval
        since: list[datetime] = [last.start + timedelta(microseconds=1)] if last else []
        if restriction.earliest:
            since.append(restriction.earliest)
        if not restriction.catchup or not since:
            since.append(self._since_now(is_first=last is None))
        span = self._next(max(since))
        if span is None or (restriction.latest and _start(span) > restriction.latest):
            return None
        interval = _interval(span, _start(span))
        return DagRunInfo(run_after=interval.start, data_interval=interval)

    def infer_manual_data_interval(self, *, run_after: pendulum.DateTime) -> DataInterval:
        """Return the window at that time, whether or not it has runs."""
        return _interval(self.windows.at(run_after), run_after)

    def serialize(self) -> dict[str, Any]:
        return {
            "windows": windows_to_data(self.windows),
            "only": self.only and [*self.only],
            "at_once": self.run_immediately,
        }

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> Self:
        return cls(data["windows"], data["only"], run_immediately=data["at_once"])

    @property
    def _names(self) -> list[str]:
        return [name for name in sizes_by_name(self.windows) if self.only is None or name in self.only]

    def _since_now(self, *, is_first: bool) -> datetime:
        """Return the earliest start of a window that gets a run."""
        now = _now()
        began = self.windows.at(now).start
        if began is None or (is_first and not self.run_immediately and began < now - STILL_AT_ONCE):
            return now
        return began

    def _next(self, since: datetime) -> WindowSpan | None:
        """Return the first window with runs that begins at `since` or later; None if there is none within 400 days."""
        span = self.windows.at(since)
        while not (self._takes(span) and span.start is not None and span.start >= since):
            if span.end is None or span.end > since + FARTHEST:
                return None
            span = self.windows.at(span.end)
        return span

    def _takes(self, span: WindowSpan) -> bool:
        """Whether the window has runs."""
        return span.start is not None and (self.only is None or span.name in self.only)


def _now() -> datetime:
    return datetime.now(UTC)


def _start(span: WindowSpan) -> datetime:
    assert span.start is not None  # noqa: S101 (windows with runs have a start)
    return span.start


def _interval(span: WindowSpan, moment: datetime) -> DataInterval:
    """Return a window as a data interval; `moment` is in it."""
    start = span.start or moment
    return DataInterval(*(pendulum.instance(each.astimezone(UTC)) for each in (start, span.end or start + FARTHEST)))


def _times(windows: TrafficWindows, names: Sequence[str]) -> list[str]:
    """Return the times of day at which these windows begin."""
    starts = {window.start for window in windows.windows if window.name in names}
    if "default" in names:
        starts |= {window.end % DAY_MINUTES for window in windows.windows}
    return [format_clock(minutes) for minutes in sorted(starts)]


def _description(windows: TrafficWindows, names: Sequence[str]) -> str:
    parts = []
    for window in windows.windows:
        days = describe_days(window.days)
        hours = f"{format_clock(window.start)} to {format_clock(window.end)}{f' on {days}' if days else ''}"
        parts.append(f"{window.name}: {hours}, {describe_sizes(window.sizes)}")
    if windows.default is not None:
        parts.append(f"default: all other times, {describe_sizes(windows.default)}")
    which = "each window" if len(names) == len(parts) else " and ".join(names)
    zone = f"Clocks of {windows.time_zone}"
    holidays = f", holidays: {len(windows.holidays)}" if windows.holidays else ""
    text = f"A run when {which} begins, for as long as it holds. {'; '.join(parts)}. {zone}{holidays}."
    return text if len(text) <= DESCRIPTION_LIMIT else f"{text[: DESCRIPTION_LIMIT - 1]}…"
