"""How much of the cluster training may use: by the forecast of the web, or else by the declared windows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec

from edl_runtime.autoscale.traffic.forecast import (
    Forecast,
    TrafficNeed,
    UnknownNeed,
    need_within_lead,
    zone_of,
)
from edl_runtime.autoscale.traffic.windows import DeclaredWindows
from edl_runtime.pods import format_amount

LEAD_S = 60.0
"""How long before a window with less for training jobs shrink: time for a pause and the start of a pod."""


class TrainingCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """What training may use of each resource, and `why`.

    - `until`: when the windows' capacity may change, lead time included; None for never.
    - `need`: what the web needs of the forecast's resource; None when windows alone decide.
    """

    capacity: Mapping[str, float]
    why: str
    until: datetime | None
    need: TrafficNeed | None = None


def training_capacity(
    windows: DeclaredWindows,
    total: Mapping[str, float],
    *,
    now: datetime,
    forecast: Forecast | None = None,
    lead_s: float = LEAD_S,
) -> TrainingCapacity:
    """Return the least that training may use of a cluster with `total`, from now until the lead time is over.

    Of the forecast's resource, training has all but what the web needs. Windows decide about other resources, and about
    all while there is no usable forecast.
    """
    return capacity_beside_web(
        declared_capacity(windows, total, now=now, lead_s=lead_s), total, now=now, forecast=forecast
    )


def declared_capacity(
    windows: DeclaredWindows, total: Mapping[str, float], *, now: datetime, lead_s: float = LEAD_S
) -> TrainingCapacity:
    """Return what the windows leave to training."""
    zone = zone_of(windows.time_zone)
    lead = timedelta(seconds=lead_s)
    span, ahead = windows.at(now), windows.at(now.astimezone(UTC) + lead)
    ends = [end for end in (span.end, ahead.end - lead if ahead.end else None) if end is not None]
    why = f"{_named(span.name)} {'hold' if span.name == 'default' else 'holds'}"
    if ahead.start != span.start and ahead.start is not None:
        why = f"{why}, and from {format_time(ahead.start.astimezone(zone), now)} on {_named(ahead.name)}"
    elif span.end is not None:
        why = f"{why} until {format_time(span.end.astimezone(zone), now)}"
    return TrainingCapacity(
        capacity=windows.capacity(now, total, lead_s=lead_s),
        why=why,
        until=min(ends, default=None),
    )


def capacity_beside_web(
    declared: TrainingCapacity, total: Mapping[str, float], *, now: datetime, forecast: Forecast | None
) -> TrainingCapacity:
    """Return what the forecast leaves to training, or `declared` without a usable forecast."""
    if forecast is None:
        return declared
    if forecast.resource not in total:
        return _declared_because(declared, f"the cluster has no {forecast.resource}")
    need = need_within_lead(
        forecast.profile, forecast.recent, now_s=now.timestamp(), forecast_options=forecast.forecast_options
    )
    if isinstance(need, UnknownNeed):
        return _declared_because(declared, _with_trouble(need.why, forecast))
    rest = max(0.0, total[forecast.resource] - need.kept)
    why = _with_trouble(_describe(need, forecast, now), forecast)
    return msgspec.structs.replace(
        declared, capacity={**declared.capacity, forecast.resource: rest}, why=why, need=need
    )


def format_time(moment: datetime, now: datetime) -> str:
    """Return a time of day, as in 18:00, or with its date if it is a day off or more."""
    return f"{moment:%H:%M}" if abs(moment - now) < timedelta(days=1) else f"{moment:%H:%M on %a %d %b}"


def _declared_because(declared: TrainingCapacity, why: str) -> TrainingCapacity:
    return msgspec.structs.replace(declared, why=f"{why}: {declared.why}")


def _with_trouble(why: str, forecast: Forecast) -> str:
    return f"{why} ({forecast.trouble})" if forecast.trouble else why


def _describe(need: TrafficNeed, forecast: Forecast, now: datetime) -> str:
    moment = datetime.fromtimestamp(need.at_s, zone_of(forecast.profile.time_zone))
    resource = forecast.resource
    amount, kept = f"{format_amount(need.needed, resource)} {resource}", format_amount(need.kept, resource)
    if not need.expected:
        return f"the web needs {amount}, as of {format_time(moment, now)}, and is left {kept}"
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None)
    slot = timedelta(seconds=forecast.profile.slot_s)
    begun = moment - (moment.replace(tzinfo=None) - midnight) % slot
    when = f"by {format_time(begun, now)}" if begun > now else "now"
    return f"the web is expected to need {amount} {when}, and is left {kept}"


def _named(window: str) -> str:
    return "the default sizes" if window == "default" else f"window {window!r}"
