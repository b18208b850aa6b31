"""What a traffic source is, and what those have in common whose records people write themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Protocol

from edl_runtime.autoscale.profile import Sample
from edl_runtime.errors import NoSamplesError
from edl_runtime.log import get_logger

Record = tuple[str, str, str]
"""Where it stands, a time, and what was needed."""

log = get_logger(__name__)


class Source(Protocol):
    """Says what the web needed."""

    async def samples(self, since_s: float, until_s: float) -> list[Sample]:
        """Return what was needed at times from `since_s` to `until_s`, seconds since 1970, in their order.

        It is as the source counts it. One that is no number is among them, for the source has said that nobody knows.

        Raises NoSamplesError when there are none, SpecError for what has to be written otherwise, as a query that can't
        be read or a file that is not there, and SourceUnavailableError (or RegistryUnavailableError, where the source
        is in Redis) for trouble that may pass.
        """


def nothing(source: str, since_s: float, until_s: float, hint: str) -> NoSamplesError:
    """Return the error that a source has nothing of a time."""
    return NoSamplesError(source, _moment(since_s), _moment(until_s), hint)


def sift(source: str, records: Iterable[Record], since_s: float, until_s: float) -> list[Sample]:
    """Return the records' samples of a time, in order; such that can't be read are skipped, and their number logged.

    A time is one of ISO 8601, in UTC if it doesn't say, or seconds since 1970. Raises NoSamplesError.
    """
    samples: list[Sample] = []
    unreadable: list[str] = []
    later = skipped = 0
    for where, time, needed in records:
        try:
            sample = Sample(at_s=_seconds(time), needed=float(needed))
        except ValueError:
            skipped += 1
            unreadable = unreadable or [f"{where}: {time[:40]!r}, {needed[:40]!r}"]
            continue
        later += sample.at_s > until_s
        if since_s <= sample.at_s <= until_s:
            samples.append(sample)
    if skipped:
        log.warning("source.skipped", source=source, records=skipped, first=unreadable[0])
    if not samples:
        hints = [f"{skipped} can't be read, as {unreadable[0]}"] if skipped else []
        hints += [f"{later} of a later time, so look at the clocks"] if later else []
        raise nothing(source, since_s, until_s, "; ".join(hints) or "is the web tier still writing?")
    return sorted(samples, key=lambda sample: sample.at_s)


def _seconds(time: str) -> float:
    try:
        seconds = float(time)
    except ValueError:
        moment = datetime.fromisoformat(time.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(time)
    return seconds


def _moment(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)
