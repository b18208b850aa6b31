"""Traffic sources with records of the user's own: a CSV file, and a Redis stream."""

from __future__ import annotations

import asyncio
import csv
import math
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from edl_runtime.autoscale.errors import NoSamplesError
from edl_runtime.autoscale.traffic.forecast import Sample
from edl_runtime.autoscale.traffic.sources.spec import CsvFile, RedisStream
from edl_runtime.errors import SpecError
from edl_runtime.log import get_logger
from edl_runtime.store.errors import MalformedRecordError
from edl_runtime.store.redis_client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

Record = tuple[str, str, str]
"""Its position for messages, a time, and the amount needed."""

log = get_logger(__name__)


class TrafficSource(Protocol):
    """Reads what the web needed."""

    async def samples(self, since_s: float, until_s: float) -> list[Sample]:
        """Return the samples from `since_s` to `until_s`, seconds since 1970, in order, in the source's unit.

        A NaN is included: it means that the need is unknown.

        Raises NoSamplesError when there are none; SpecError for a mistake in the spec, as a query that can't be parsed
        or a missing file; SourceUnavailableError (RegistryUnavailableError for a stream) for errors that may pass.
        """


def no_samples(source: str, since_s: float, until_s: float, hint: str) -> NoSamplesError:
    """Return the error that a source has no samples of a time."""
    return NoSamplesError(source, _moment(since_s), _moment(until_s), hint)


def parse_records(source: str, records: Iterable[Record], since_s: float, until_s: float) -> list[Sample]:
    """Return the samples of a time in order. Unreadable records are skipped, and their number is logged.

    A time is ISO 8601, by default in UTC, or seconds since 1970. Raises NoSamplesError.
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
        log.warning("source.records_skipped", source=source, records=skipped, first=unreadable[0])
    if not samples:
        hints = [f"{skipped} can't be read, as {unreadable[0]}"] if skipped else []
        hints += [f"{later} have a later time, so check the clocks"] if later else []
        raise no_samples(source, since_s, until_s, "; ".join(hints) or "is the web tier still writing?")
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


COLUMNS = ("time", "needed")


class CsvSource:
    """Reads the whole file each time, in a thread: a month of minutes is a megabyte."""

    def __init__(self, spec: CsvFile) -> None:
        self._path = Path(spec.path).expanduser()

    async def samples(self, since_s: float, until_s: float) -> list[Sample]:
        """See `TrafficSource` and `parse_records`."""
        return await asyncio.to_thread(self._samples, since_s, until_s)

    def _samples(self, since_s: float, until_s: float) -> list[Sample]:
        return parse_records(f"the file {self._path}", self._records(), since_s, until_s)

    def _records(self) -> Iterator[Record]:
        lines = self._text().splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):  # it is still being written
            del lines[-1]
        rows = csv.DictReader(lines, restval="")
        names = [name.strip() for name in rows.fieldnames or ()]
        if not lines:
            return
        if missing := [column for column in COLUMNS if column not in names]:
            allowed = (
                f"a CSV file with the columns {' and '.join(COLUMNS)}; its first line is {lines[0].strip()[:80]!r}"
            )
            raise SpecError("traffic.csv.path", str(self._path), f"{allowed}, without {' and '.join(missing)}")
        rows.fieldnames = names
        try:
            for row in rows:
                yield f"line {rows.line_num}", row["time"], row["needed"]
        except csv.Error as error:
            allowed = f"a CSV file; line {rows.line_num + 1} is none ({error})"
            raise SpecError("traffic.csv.path", str(self._path), allowed) from None

    def _text(self) -> str:
        try:
            if self._path.exists() and not self._path.is_file():  # opening a pipe would block
                raise SpecError("traffic.csv.path", str(self._path), "a file")
            with self._path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
                return file.read()
        except OSError as error:
            cause = error.strerror or type(error).__name__
            raise SpecError("traffic.csv.path", str(self._path), f"a CSV file that can be read ({cause})") from None


PAGE = 1_000
"""Entries of a read: more at once would block the event loop."""


class StreamSource:
    """Reads entries with ids from `since_s` on: an entry's time is never after its id's."""

    def __init__(self, spec: RedisStream, client: Redis) -> None:
        self._stream = spec.stream
        self._client = client

    async def samples(self, since_s: float, until_s: float) -> list[Sample]:
        """See `TrafficSource` and `parse_records`."""
        records = [record async for record in self._records(since_s)]
        return await asyncio.to_thread(parse_records, f"the Redis stream {self._stream!r}", records, since_s, until_s)

    async def _records(self, since_s: float) -> AsyncIterator[Record]:
        least = f"{max(0, int(since_s * 1000))}-0"
        while entries := await self._page(least):
            for entry_id, fields in entries:
                at = f"{int(entry_id.partition('-')[0]) / 1000}"
                yield f"entry {entry_id}", fields.get("at", at), fields.get("needed", "")
            if len(entries) < PAGE:
                return
            least = f"({entries[-1][0]}"

    async def _page(self, least: str) -> list[tuple[str, Mapping[str, str]]]:
        try:
            with unavailable_if_lost(self._client, self._stream):
                entries = await self._client.xrange(self._stream, min=least, count=PAGE)
                return cast(list[tuple[str, Mapping[str, str]]], entries)
        except MalformedRecordError as error:
            allowed = f"the key of a stream; Redis says: {error.cause}"
            raise SpecError("traffic.redis.stream", self._stream, allowed) from None
