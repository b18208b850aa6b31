"""Traffic windows: times of day with their own sizes for training, because the web is busy or quiet.

A window's times are local ones of its time zone. A window from 22:00 to 06:00 starts on each of its days and ends on
the next day, whatever day that is. When clocks change within a window, it is an hour shorter or longer; a window within
the hour that repeats repeats, too.
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
"""Kinds of days. A holiday is no day of the week."""

DAY_MINUTES = 24 * 60
FARTHEST = timedelta(days=400)
"""How far ahead, or back, the edges of a window are searched."""


class Size(msgspec.Struct, frozen=True):
    """An amount, or with `share` a share of the whole, 0 to 1. Raises SpecError."""

    amount: float
    share: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.amount < math.inf or (self.share and self.amount > 1):
            raise SpecError("size", str(self), "a number, 0 or more, or a share as in 40%, 0% to 100%")

    def of(self, whole: float) -> float:
        """Return the amount of a `whole`, at most all of it."""
        return whole * self.amount if self.share else min(self.amount, whole)

    def __str__(self) -> str:
        return f"{self.amount * 100:g}%" if self.share else f"{self.amount:g}"


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What training may have in a window.

    - `cluster`: by resource, what all instances together may use; "*" is for resources that are not named. By default
      everything.
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
        """Return what training may use of each resource of a cluster with `total`."""
        rest = self.cluster.get("*", Size(1.0, share=True))
        return {name: self.cluster.get(name, rest).of(whole) for name, whole in total.items()}

    def most(
        self, kind: Literal["jobs", "pools"], name: str, resources: Mapping[str, float], capacity: Mapping[str, float]
    ) -> int | None:
        """Return the most instances of a job or pool, None when it has no size of its own.

        `resources`: what an instance needs. `capacity`: what training may use.
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
        """Its minutes on the day on which it starts."""
        return self.start, self.end if self.end > self.start else DAY_MINUTES

    @property
    def tail(self) -> tuple[int, int]:
        """Its minutes on the next day, empty for most."""
        return 0, self.end if self.end < self.start else 0


class WindowSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One occurrence of a window, or of the default, from `start` to before `end`.

    `name` is the window's, or "default". A start or end that is not within 400 days is None.
    """

    name: str
    sizes: Sizes
    start: datetime | None
    end: datetime | None


class DeclaredWindows(msgspec.Struct, frozen=True, kw_only=True):
    """All windows, and the `default` sizes of the times between them.

    - `time_zone`: of the windows' times, as named in the tz database.
    - `holidays`: dates on which only windows of the day "holiday" start.

    Raises SpecError for windows that overlap, for times that no window covers when there is no default, and for unknown
    time zones.
    """

    windows: tuple[Window, ...]
    default: Sizes | None = None
    time_zone: str = "UTC"
    holidays: frozenset[date] = frozenset()

    @property
    def traffic(self) -> Traffic | None:
        """The source of what the web needs; None for windows alone."""
        return None

    def declared(self) -> DeclaredWindows:
        """Return the windows alone."""
        return DeclaredWindows(**{name: getattr(self, name) for name in DeclaredWindows.__struct_fields__})

    def __post_init__(self) -> None:
        zone_of(self.time_zone)
        names = [window.name for window in self.windows]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise SpecError(f"windows[{number}].name", name, "a unique name")
            if name == "default":
                raise SpecError(f"windows[{number}].name", name, "another name: default is the times between windows")
        for before, day in _days_in_a_row(holidays=bool(self.holidays)):
            self._check_day(before, day)

    def at(self, moment: datetime) -> WindowSpan:
        """Return the window at a moment, which must have a time zone."""
        window = self._window(moment)
        edges = [self._edge(moment, step) for step in (-1, 1)]
        name, sizes = (window.name, window.sizes) if window else ("default", self.default or Sizes())
        return WindowSpan(name=name, sizes=sizes, start=edges[0], end=edges[1])

    def capacity(self, moment: datetime, total: Mapping[str, float], *, lead_s: float = 0.0) -> dict[str, float]:
        """Return the least that training may use of each resource from a moment until the lead time is over."""
        each = [span.sizes.capacity(total) for span in self.spans(moment, lead_s=lead_s)]
        return {name: min(capacity[name] for capacity in each) for name in total}

    def spans(self, moment: datetime, *, lead_s: float = 0.0) -> Iterator[WindowSpan]:
        """Yield the window at a moment, and those that begin until the lead time is over."""
        span = self.at(moment)
        yield span
        until = moment.astimezone(UTC) + timedelta(seconds=lead_s)
        while span.end is not None and span.end <= until:
            span = self.at(span.end)
            yield span

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
        """Return when the window at a moment begins (-1) or ends (1)."""
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


class TrafficWindows(DeclaredWindows, frozen=True, kw_only=True):
    """Windows, and the source of what the web needs: while that is known, training has the rest."""

    traffic: Traffic | None = None


def format_clock(minutes: int) -> str:
    """Return a time of day as in 06:30."""
    return f"{minutes // 60:02}:{minutes % 60:02}"


def _days_in_a_row(*, holidays: bool) -> Iterator[tuple[str, str]]:
    """Yield the pairs of kinds of days that may follow one another."""
    for number, day in enumerate(WEEK):
        yield WEEK[number - 1], day
        if holidays:
            yield "holiday", day
            yield day, "holiday"
    if holidays:
        yield "holiday", "holiday"


def _turns(day: date, minutes: Sequence[int], zone: ZoneInfo) -> list[datetime]:
    """Return when, on a day of UTC, local clocks show these times or are changed, in order.

    By local days they would not be in order: where clocks change near midnight, days overlap or leave a gap.
    """
    begins = datetime.combine(day, time(), UTC)
    ends = begins + timedelta(days=1)
    shown = {moment for by in (-1, 0, 1) for moment in _moments(day + timedelta(days=by), minutes, zone)}
    return sorted({turn for turn in shown if begins < turn <= ends} | {*_clock_changes(begins, ends, zone)})


def _moments(day: date, minutes: Sequence[int], zone: ZoneInfo) -> Iterator[datetime]:
    """Yield when local clocks show these times on a day: twice in an hour that repeats."""
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
