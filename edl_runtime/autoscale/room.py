"""How much of the cluster is for training: what is known of the web says it, or else the declared windows do.

All that is decided here is pure. `sources.outlook` asks a traffic source what is known of the web.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from edl_runtime.autoscale.profile import Foresight, Need, Profile, Sample, Unknown, needed_soon
from edl_runtime.autoscale.traffic import TrafficWindows
from edl_runtime.autoscale.zones import zone_of

LEAD_S = 60.0
"""So long before a window begins that leaves less to training, jobs shrink: a pause, and the start of a pod."""


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the web's need of one `resource`.

    - `profile`, `recent`: what was learned of days like this one, and the latest samples, the newest last.
    - `foresight`: how carefully both are used.
    - `trouble`: why the source could not be asked just now, or not be learned from, in words; empty when it could.
    """

    resource: str
    profile: Profile
    recent: Sequence[Sample]
    foresight: Foresight = Foresight()
    trouble: str = ""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What training may use of each resource, and `why`, in words.

    - `window`: what holds by the clock, a window's name or "default".
    - `until`: when windows may leave something else, the lead time counted; None for never.
    - `need`: what the web is left of the outlook's resource; None when windows alone decide.
    """

    capacity: Mapping[str, float]
    why: str
    window: str
    until: datetime | None
    need: Need | None = None


def room_for_training(
    windows: TrafficWindows,
    total: Mapping[str, float],
    *,
    now: datetime,
    outlook: Outlook | None = None,
    lead_s: float = LEAD_S,
) -> Room:
    """Return what training may use of a cluster that has `total`, from now until the lead time is over.

    With an outlook, all of its resource but what the web is to be left; windows say it of the others. They say it of
    all resources without one, while the source is silent, and at times that the profile does not know.
    """
    return beside_the_web(declared_room(windows, total, now=now, lead_s=lead_s), total, now=now, outlook=outlook)


def declared_room(
    windows: TrafficWindows, total: Mapping[str, float], *, now: datetime, lead_s: float = LEAD_S
) -> Room:
    """Return what windows leave to training."""
    zone = zone_of(windows.time_zone)
    lead = timedelta(seconds=lead_s)
    span, ahead = windows.at(now), windows.at(now.astimezone(UTC) + lead)
    ends = [end for end in (span.end, ahead.end - lead if ahead.end else None) if end is not None]
    why = f"{_named(span.name)} {'hold' if span.name == 'default' else 'holds'}"
    if ahead.start != span.start and ahead.start is not None:
        why = f"{why}, and from {clock_time(ahead.start.astimezone(zone), now)} on {_named(ahead.name)}"
    elif span.end is not None:
        why = f"{why} until {clock_time(span.end.astimezone(zone), now)}"
    return Room(
        capacity=windows.capacity(now, total, lead_s=lead_s),
        why=why,
        window=span.name,
        until=min(ends, default=None),
    )


def beside_the_web(declared: Room, total: Mapping[str, float], *, now: datetime, outlook: Outlook | None) -> Room:
    """Return what is left to training when the web has what it is to be left; what windows leave if nobody knows."""
    if outlook is None:
        return declared
    if outlook.resource not in total:
        return _held(declared, f"the cluster has no {outlook.resource}")
    need = needed_soon(outlook.profile, outlook.recent, now_s=now.timestamp(), foresight=outlook.foresight)
    if isinstance(need, Unknown):
        return _held(declared, _beside_trouble(need.why, outlook))
    rest = max(0.0, total[outlook.resource] - need.kept)
    why = _beside_trouble(_said(need, outlook, now), outlook)
    return msgspec.structs.replace(declared, capacity={**declared.capacity, outlook.resource: rest}, why=why, need=need)


def clock_time(moment: datetime, now: datetime) -> str:
    """Return a time of day, as in 18:00, or with its date if it is a day off or more."""
    return f"{moment:%H:%M}" if abs(moment - now) < timedelta(days=1) else f"{moment:%H:%M on %a %d %b}"


def _held(declared: Room, why: str) -> Room:
    return msgspec.structs.replace(declared, why=f"{why}: {declared.why}")


def _beside_trouble(why: str, outlook: Outlook) -> str:
    return f"{why} ({outlook.trouble})" if outlook.trouble else why


def _said(need: Need, outlook: Outlook, now: datetime) -> str:
    moment = datetime.fromtimestamp(need.at_s, zone_of(outlook.profile.time_zone))
    amount, kept = f"{shown(need.needed)} {outlook.resource}", shown(need.kept)
    if not need.expected:
        return f"the web needs {amount}, as of {clock_time(moment, now)}, and is left {kept}"
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None)
    slot = timedelta(seconds=outlook.profile.slot_s)
    begun = moment - (moment.replace(tzinfo=None) - midnight) % slot
    when = f"by {clock_time(begun, now)}" if begun > now else "now"
    return f"the web is expected to need {amount} {when}, and is left {kept}"


def shown(amount: float) -> str:
    """Return an amount as people read it: 14.2, or 65,536."""
    return f"{amount:,.1f}".removesuffix(".0")


def _named(window: str) -> str:
    return "the default sizes" if window == "default" else f"window {window!r}"
