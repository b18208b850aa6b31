"""Traffic windows: spans of the day in which training has sizes of its own, because the web is busy or quiet.

A window is told by the clock on the wall of its time zone. So one from 22:00 to 06:00 begins on each of its days and
ends on the day after, whatever day that is, and daylight-saving time moves no edge: a window is an hour shorter or
longer when clocks change within it, and what lies in an hour that comes twice comes twice.

`traffic_schema` reads windows from YAML, JSON and Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from typing import Literal
from zoneinfo import ZoneInfo

import msgspec

from edl_runtime.autoscale.traffic.forecast import zone_of
from edl_runtime.autoscale.traffic.sources.spec import Traffic
from edl_runtime.errors import SpecError

WEEK = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAYS = (*WEEK, "holiday")
"""Kinds of days: a holiday is that alone, whatever day of the week it is."""

DAY_MINUTES = 24 * 60
FARTHEST = timedelta(days=400)
"""How far ahead, or back, an edge is looked for."""


class Size(msgspec.Struct, frozen=True):
    """A number of something, or with `share` a part of all of it, 0 to 1. Raises SpecError."""

    amount: float
    share: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.amount < math.inf or (self.share and self.amount > 1):
            raise SpecError("size", str(self), "a number, 0 or more, or a share as in 40%, 0% to 100%")

    def of(self, whole: float) -> float:
        """Return how much it is of so much, at most all of it."""
        return whole * self.amount if self.share else min(self.amount, whole)

    def __str__(self) -> str:
        return f"{self.amount * 100:g}%" if self.share else f"{self.amount:g}"


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What training may have in a window.

    - `cluster`: of each resource what all instances together may use, as a number or a share of the cluster; "*" is for
      resources that are not named. Without it, all.
    - `jobs`, `pools`: by name, the most instances, or a share of what training may use.

    Raises SpecError if the shares of jobs and pools add up to more than 100 %.
    """

    cluster: Mapping[str, Size] = {}
    jobs: Mapping[str, Size] = {}
    pools: Mapping[str, Size] = {}

    def __post_init__(self) -> None:
        shares = {name: size.amount for sizes in (self.jobs, self.pools) for name, size in sizes.items() if size.share}
        if (total := sum(shares.values())) > 1 + 1e-9:
            listed = " + ".join(f"{name} {amount * 100:g}%" for name, amount in shares.items())
            raise SpecError("shares", f"{listed} = {total * 100:g}%", "shares of jobs and pools that are 100% at most")
        for kind in ("jobs", "pools"):
            for name, size in getattr(self, kind).items():
                if not size.share and size.amount != int(size.amount):
                    raise SpecError(f"{kind}.{name}", str(size), "a whole number of instances, or a share")

    def capacity(self, total: Mapping[str, float]) -> dict[str, float]:
        """Return what training may use of each resource of a cluster that has so much."""
        rest = self.cluster.get("*", Size(1.0, share=True))
        return {name: self.cluster.get(name, rest).of(whole) for name, whole in total.items()}

    def most(
        self, kind: Literal["jobs", "pools"], name: str, resources: Mapping[str, float], capacity: Mapping[str, float]
    ) -> int | None:
        """Return the most instances of a job or pool, None when it has no size of its own.

        `resources` is what an instance needs, and `capacity` what training may use.
        """
        sizes = self.jobs if kind == "jobs" else self.pools
        if (size := sizes.get(name)) is None:
            return None
        if not size.share:
            return int(size.amount)
        fits = [size.of(capacity[name]) / need for name, need in resources.items() if need and name in capacity]
        return math.floor(min(fits) + 1e-9) if fits else None


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """From `start` to before `end`, minutes since midnight of a day; an end before the start is the next day's.

    `days` are the days on which it starts. Raises SpecError.
    """

    name: str
    start: int
    end: int
    sizes: Sizes
    days: frozenset[str] = frozenset(DAYS)

    def __post_init__(self) -> None:
        if not self.name:
            raise SpecError("name", self.name, "a name")
        for field, minutes, latest in (("start", self.start, DAY_MINUTES - 1), ("end", self.end, DAY_MINUTES)):
            if not 0 <= minutes <= latest:
                raise SpecError(field, format_clock(minutes), f"00:00 to {format_clock(latest)}")
        if self.start % DAY_MINUTES == self.end % DAY_MINUTES and self.end - self.start != DAY_MINUTES:
            raise SpecError("end", format_clock(self.end), "another time than its start; 00:00 to 24:00 is a whole day")
        if unknown := sorted(self.days - {*DAYS}):
            raise SpecError("days", unknown[0], f"some of {', '.join(DAYS)}")
        if not self.days:
            raise SpecError("days", "none", f"some of {', '.join(DAYS)}")

    @property
    def head(self) -> tuple[int, int]:
        """Its span on the day on which it starts."""
        return self.start, self.end if self.end > self.start else DAY_MINUTES

    @property
    def tail(self) -> tuple[int, int]:
        """Its span on the day after, empty for most."""
        return 0, self.end if self.end < self.start else 0


class WindowSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One time that a window, or the default, holds: from `start` to before `end`.

    `name` is the window's, or "default". None is for a start or end that is not within 400 days.
    """

    name: str
    sizes: Sizes
    start: datetime | None
    end: datetime | None


class TrafficWindows(msgspec.Struct, frozen=True, kw_only=True):
    """All windows, and the `default` sizes of the times between them.

    - `time_zone`: whose clock tells the windows' times, by its name in the tz database.
    - `holidays`: dates on which only windows of the day "holiday" start.
    - `traffic`: from where it is known what the web needs; None for windows alone.

    Raises SpecError for windows that overlap, for times that no window covers when there is no default, and for unknown
    time zones.
    """

    windows: tuple[Window, ...]
    default: Sizes | None = None
    time_zone: str = "UTC"
    holidays: frozenset[date] = frozenset()
    traffic: Traffic | None = None

    def __post_init__(self) -> None:
        zone_of(self.time_zone)
        names = [window.name for window in self.windows]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise SpecError(f"windows[{number}].name", name, "a name of its own: two windows have this one")
            if name == "default":
                raise SpecError(f"windows[{number}].name", name, "another name: this is that of the times between")
        for before, day in _days_in_a_row(holidays=bool(self.holidays)):
            self._check_day(before, day)

    def at(self, moment: datetime) -> WindowSpan:
        """Return what holds at a moment, which has to have a time zone of its own."""
        window = self._window(moment)
        edges = [self._edge(moment, step) for step in (-1, 1)]
        name, sizes = (window.name, window.sizes) if window else ("default", self._default())
        return WindowSpan(name=name, sizes=sizes, start=edges[0], end=edges[1])

    def sizes_at(self, moment: datetime) -> Sizes:
        """Return the sizes that hold at a moment."""
        window = self._window(moment)
        return window.sizes if window else self._default()

    def capacity(self, moment: datetime, total: Mapping[str, float], *, lead_s: float = 0.0) -> dict[str, float]:
        """Return the least that training may use of each resource from a moment until the lead time is over.

        With a lead time jobs shrink before a window begins that has less for them.
        """
        each = [span.sizes.capacity(total) for span in self.spans(moment, lead_s=lead_s)]
        return {name: min(capacity[name] for capacity in each) for name in total}

    def spans(self, moment: datetime, *, lead_s: float = 0.0) -> Iterator[WindowSpan]:
        """Yield what holds at a moment, and what begins until the lead time is over."""
        span = self.at(moment)
        yield span
        until = moment.astimezone(UTC) + timedelta(seconds=lead_s)
        while span.end is not None and span.end <= until:
            span = self.at(span.end)
            yield span

    def _default(self) -> Sizes:
        return self.default or Sizes()

    def _kind(self, day: date) -> str:
        return "holiday" if day in self.holidays else WEEK[day.weekday()]

    def _window(self, moment: datetime) -> Window | None:
        wall = moment.astimezone(zone_of(self.time_zone))
        minute = wall.hour * 60 + wall.minute
        today = self._kind(wall.date())
        before = self._kind(wall.date() - timedelta(days=1))
        for window in self.windows:
            if today in window.days and window.head[0] <= minute < window.head[1]:
                return window
            if before in window.days and minute < window.tail[1]:
                return window
        return None

    def _edge(self, moment: datetime, step: Literal[-1, 1]) -> datetime | None:
        """Return when what holds at a moment begins (-1) or ends (1)."""
        if not self.windows:
            return None
        zone = zone_of(self.time_zone)
        held = self._window(moment)
        minutes = sorted({0, *(edge % DAY_MINUTES for window in self.windows for edge in (window.start, window.end))})
        for days in range(FARTHEST.days):
            turns = _turns(moment.astimezone(UTC).date() + timedelta(days=days * step), minutes, zone)
            for turn in turns[::step]:
                if step > 0 and turn > moment and self._window(turn) is not held:
                    return turn
                if step < 0 and turn <= moment and self._window(turn - timedelta(seconds=1)) is not held:
                    return turn
        return None

    def _check_day(self, before: str, day: str) -> None:
        """Raise SpecError if windows overlap or leave a gap on a day of one kind after one of another."""
        covered = sorted(
            [(*window.head, number) for number, window in enumerate(self.windows) if day in window.days]
            + [(*window.tail, number) for number, window in enumerate(self.windows) if before in window.days]
        )
        covered = [span for span in covered if span[0] < span[1]]
        for (_, end, first), (start, other_end, second) in pairwise(covered):
            if start < end:
                names = " and ".join(repr(self.windows[number].name) for number in (first, second))
                both = f"{names} on {day} from {format_clock(start)} to {format_clock(min(end, other_end))}"
                allowed = "one window at a time; `default` has the sizes of all times between windows"
                raise SpecError(f"windows[{max(first, second)}]", both, allowed)
        if self.default is not None:
            return
        edges = [(0, 0, 0), *covered, (DAY_MINUTES, DAY_MINUTES, 0)]
        for (_, end, _), (start, _, _) in pairwise(edges):
            if start > end:
                gap = f"none on {day} from {format_clock(end)} to {format_clock(start)}"
                raise SpecError("windows", gap, "a window for each time, or `default` with the sizes of all others")


def format_clock(minutes: int) -> str:
    """Return a time of day as in 06:30."""
    return f"{minutes // 60:02}:{minutes % 60:02}"


def _days_in_a_row(*, holidays: bool) -> Iterator[tuple[str, str]]:
    """Yield which kinds of days may follow one another."""
    for number, day in enumerate(WEEK):
        yield WEEK[number - 1], day
        if holidays:
            yield "holiday", day
            yield day, "holiday"
    if holidays:
        yield "holiday", "holiday"


def _turns(day: date, minutes: Sequence[int], zone: ZoneInfo) -> list[datetime]:
    """Return when, on a day of UTC, a clock in the zone shows these times or is changed, in order.

    By its own days they would not come in order: where clocks change near midnight these overlap, or leave a gap.
    """
    begins = datetime.combine(day, time(), UTC)
    ends = begins + timedelta(days=1)
    shown = {moment for by in (-1, 0, 1) for moment in _moments(day + timedelta(days=by), minutes, zone)}
    return sorted({turn for turn in shown if begins < turn <= ends} | {*_clock_changes(begins, ends, zone)})


def _moments(day: date, minutes: Sequence[int], zone: ZoneInfo) -> Iterator[datetime]:
    """Yield when the clock shows these times on a day: twice in an hour that comes twice."""
    for minute in minutes:
        for fold in (0, 1):
            wall = datetime.combine(day, time(minute // 60, minute % 60), zone).replace(fold=fold)
            yield wall.astimezone(UTC)


def _clock_changes(low: datetime, high: datetime, zone: ZoneInfo) -> Iterator[datetime]:
    """Yield when clocks are changed between two times, to the second."""

    def offset(moment: datetime) -> timedelta | None:
        return moment.astimezone(zone).utcoffset()

    if offset(low) == offset(high):
        return
    before = offset(low)
    while high - low > timedelta(seconds=1):
        middle = low + timedelta(seconds=(high - low).total_seconds() // 2)
        low, high = (middle, high) if offset(middle) == before else (low, middle)
    yield high
