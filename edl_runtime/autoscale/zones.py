"""Time zones by their names."""

from __future__ import annotations

from zoneinfo import ZoneInfo

from edl_runtime.errors import SpecError


def zone_of(name: str) -> ZoneInfo:
    """Return a time zone by its name. Raises SpecError."""
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        raise SpecError("time_zone", name, "a name of the tz database, as in Europe/Berlin or UTC") from None
