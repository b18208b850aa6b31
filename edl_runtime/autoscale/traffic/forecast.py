"""Forecasts what the web will need: a seasonal profile of past samples, with headroom and lead time. Pure.

A day has slots, and there are two kinds of days: working days and weekends. The profile of a slot is the median of the
slot and its neighbours over all days of its kind, so that one burst changes nothing. The forecast is the maximum of the
profile until the lead time is over, with headroom for differences between days, so jobs shrink before the rush. The
current need has headroom of its own, for bursts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from statistics import median
from zoneinfo import ZoneInfo

import msgspec

from edl_runtime.errors import SpecError


def zone_of(name: str) -> ZoneInfo:
    """Return a time zone by its name. Raises SpecError."""
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        raise SpecError("time_zone", name, "a name of the tz database, as in Europe/Berlin or UTC") from None


DAY_S = 86_400
YEAR_S = 366 * DAY_S

CARRY_FORWARD_S = 3600
"""For this long, a slot without samples repeats the one before."""

CLOCK_SKEW_S = 1.0
"""A sample that is ahead of this clock by no more counts as current: clocks differ."""

LEARN_EVERY_S = 3600.0
"""How often a profile is learned again."""


class Sample(msgspec.Struct, frozen=True):
    """How much of a resource the web needed at a time, in seconds since 1970."""

    at_s: float
    needed: float

    @property
    def valid(self) -> bool:
        """Whether it is a number, 0 or more. Other samples are ignored."""
        return 0 <= self.needed < math.inf


class ForecastOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Safety margins of a forecast.

    - `headroom`: factor on the profile, 1 or more.
    - `burst_headroom`: factor on the current need, 1 or more.
    - `lead_s`: how long before the web needs more training has less: at least a pause and the start of a pod.
    - `silent_after_s`: when the last sample is older than this, declared windows decide.
    - `memory_s`: samples that are older are not learned from.
    - `slot_s`: length of a slot.

    Raises SpecError.
    """

    headroom: float = 1.15
    burst_headroom: float = 1.05
    lead_s: float = 600.0
    silent_after_s: float = 1800.0
    memory_s: float = 28.0 * DAY_S
    slot_s: int = 600

    def __post_init__(self) -> None:
        for field in ("headroom", "burst_headroom"):
            if not 1 <= getattr(self, field) < math.inf:
                raise SpecError(field, getattr(self, field), "1 or more")
        for field in ("lead_s", "silent_after_s", "memory_s"):
            if not 0 <= getattr(self, field) <= YEAR_S:
                raise SpecError(field, getattr(self, field), f"seconds, 0 to {YEAR_S:,}: a year")
        if not 1 <= self.slot_s <= DAY_S or DAY_S % self.slot_s or self.slot_s != int(self.slot_s):
            raise SpecError("slot_s", self.slot_s, "seconds that divide a day, as 600")


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What the web needs in each known slot: those of a working day, and then those of a weekend's day."""

    slots: Mapping[int, float]
    time_zone: str = "UTC"
    slot_s: int = 600

    def expected(self, at_s: float) -> float | None:
        """Return the profile at a time, None if its slot is unknown."""
        return self.slots.get(_slot(at_s, self.time_zone, self.slot_s))


def learn_profile(
    samples: Iterable[Sample], *, now_s: float, forecast_options: ForecastOptions | None = None, time_zone: str = "UTC"
) -> Profile:
    """Return the profile of the samples until now; later ones, of a clock that jumped, are ignored."""
    forecast_options = forecast_options or ForecastOptions()
    seen: dict[int, list[float]] = {}
    for sample in samples:
        if now_s - forecast_options.memory_s <= sample.at_s <= now_s and sample.valid:
            seen.setdefault(_slot(sample.at_s, time_zone, forecast_options.slot_s), []).append(sample.needed)
    count = DAY_S // forecast_options.slot_s
    carried = CARRY_FORWARD_S // forecast_options.slot_s
    slots: dict[int, float] = {}
    for slot in seen:
        first = slot - slot % count  # of this kind of day
        near = [need for by in (-1, 0, 1) for need in seen.get(first + (slot + by) % count, ())]
        for by in range(carried + 1):
            following = first + (slot + by) % count
            if by and following in seen:
                break
            slots[following] = median(near)
    return Profile(slots=slots, time_zone=time_zone, slot_s=forecast_options.slot_s)


class TrafficNeed(msgspec.Struct, frozen=True, kw_only=True):
    """What to keep for the web, `kept`: what is `needed` at a time, in seconds since 1970, with headroom.

    `expected`: whether it is from the profile, or else from the last sample.
    """

    kept: float
    needed: float
    at_s: float
    expected: bool


class UnknownNeed(msgspec.Struct, frozen=True):
    """Why there is no forecast, so that declared windows decide."""

    why: str


def need_within_lead(
    profile: Profile, recent: Sequence[Sample], *, now_s: float, forecast_options: ForecastOptions | None = None
) -> TrafficNeed | UnknownNeed:
    """Return the most to keep for the web from now until the lead time is over.

    `recent`: the latest samples, newest last. UnknownNeed when the source is silent, or the profile has no such slot.
    """
    forecast_options = forecast_options or ForecastOptions()
    last = latest_sample(recent, now_s)
    if last is None or now_s - last.at_s > forecast_options.silent_after_s:
        return UnknownNeed(_silence(recent, last, now_s))
    steps = math.ceil(forecast_options.lead_s / forecast_options.slot_s)
    times = [now_s + min(step * forecast_options.slot_s, forecast_options.lead_s) for step in range(steps + 1)]
    needs = [
        TrafficNeed(
            kept=last.needed * forecast_options.burst_headroom, needed=last.needed, at_s=last.at_s, expected=False
        )
    ]
    for at_s in times:
        expected = profile.expected(at_s)
        if expected is None:
            return UnknownNeed("no earlier day like this one has samples of this time")
        needs.append(TrafficNeed(kept=expected * forecast_options.headroom, needed=expected, at_s=at_s, expected=True))
    return max(needs, key=lambda need: need.kept)


def latest_sample(samples: Sequence[Sample], now_s: float) -> Sample | None:
    """Return the last valid sample that is not in the future, as those of a clock that jumped."""
    return next((sample for sample in reversed(samples) if sample.at_s <= now_s + CLOCK_SKEW_S and sample.valid), None)


def _silence(recent: Sequence[Sample], last: Sample | None, now_s: float) -> str:
    if last is not None:
        return f"no sample from the source for {(now_s - last.at_s) / 60:.0f} min"
    ahead = min((sample.at_s for sample in recent if sample.at_s > now_s + CLOCK_SKEW_S), default=None)
    if ahead is not None:
        return f"all samples are in the future, from {(ahead - now_s) / 60:.0f} min ahead on"
    return f"no {'valid ' if recent else ''}sample from the source"


def _slot(at_s: float, time_zone: str, slot_s: int) -> int:
    wall = datetime.fromtimestamp(at_s, zone_of(time_zone))
    slot = (wall.hour * 3600 + wall.minute * 60 + wall.second) // slot_s
    return slot + (DAY_S // slot_s if wall.weekday() >= 5 else 0)


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The web's need of one `resource`.

    - `profile`, `recent`: the learned profile, and the latest samples, newest last.
    - `forecast_options`: the safety margins.
    - `trouble`: why the source could not be read just now; empty when it could.
    """

    resource: str
    profile: Profile
    recent: Sequence[Sample]
    forecast_options: ForecastOptions = ForecastOptions()
    trouble: str = ""
