"""Deadlines of trainings (`ends_by`). Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, time, timedelta, tzinfo
from typing import TypeAlias

from edl_runtime.errors import SpecError

EndsBy: TypeAlias = str | timedelta | datetime
"""A time of day ("07:00"), a duration since the start (a timedelta, "PT8H30M"), or a moment (ISO text, datetime)."""

ALLOWED = "a time of day as '07:00', a duration above 0 as 'PT8H30M' or a timedelta, or a moment as '2026-01-31T07:00'"
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d\S*")
_DURATION = re.compile(r"PT(?=\d)(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)S)?")
_TIME_OF_DAY = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?")


def deadline_of(ends_by: object, *, start: datetime, due: datetime | None = None, zone: tzinfo = UTC) -> datetime:
    """Return the moment that `ends_by` means for a run that started at `start`. Raises SpecError.

    A time of day is the next one in `zone` after `due`, when the run was scheduled to start (None: after `start`), so
    it may have passed for a run that starts late. It is the same for every try: a late try does not train until the
    next day. A moment without a zone is in `zone`.
    """
    if isinstance(ends_by, str) and (found := _DURATION.fullmatch(ends_by.strip())):
        hours, minutes, seconds = (int(part or 0) for part in found.groups())
        ends_by = timedelta(hours=hours, minutes=minutes, seconds=seconds)
    if isinstance(ends_by, timedelta):
        if ends_by <= timedelta(0):
            raise SpecError("ends_by", ends_by, ALLOWED)
        return start + ends_by
    if isinstance(ends_by, str) and (found := _TIME_OF_DAY.fullmatch(ends_by.strip())):
        hour, minute, second = (int(part or 0) for part in found.groups())
        return _next(time(hour, minute, second), due or start, zone)
    moment = _moment(ends_by)
    return moment if moment.tzinfo else moment.replace(tzinfo=zone)


def check_ends_by(_: str, ends_by: object) -> object:
    """Return `ends_by` if it is valid, else raise SpecError."""
    deadline_of(ends_by, start=datetime(2026, 1, 1, tzinfo=UTC))
    return ends_by


def _next(at: time, after: datetime, zone: tzinfo) -> datetime:
    today = after.astimezone(zone).date()
    moments = [
        moment for day in (0, 1) for moment in _such_times(datetime.combine(today + timedelta(days=day), at), zone)
    ]
    return min(moment for moment in moments if moment > after)


def _such_times(local: datetime, zone: tzinfo) -> list[datetime]:
    """Return the moments of a local time: two in the hour that repeats in autumn, else one.

    For a time that spring skips: the moment by the offset before the change.
    """
    first, second = (local.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    return [first, second] if first < second else [first]


def _moment(ends_by: object) -> datetime:
    if isinstance(ends_by, datetime):
        return ends_by
    text = str(ends_by).strip()
    try:
        return datetime.fromisoformat(text if _MOMENT.fullmatch(text) else "")
    except ValueError:
        raise SpecError("ends_by", ends_by, ALLOWED) from None
