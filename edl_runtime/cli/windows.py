"""`edl windows`: check traffic windows and their source, and show what training may use."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click
import msgspec

from edl_runtime.autoscale.traffic.capacity import TrainingCapacity, format_time, training_capacity
from edl_runtime.autoscale.traffic.forecast import DAY_S, Forecast, Sample, zone_of
from edl_runtime.autoscale.traffic.schema import read_windows
from edl_runtime.autoscale.traffic.sources.learner import check_source, fetch_forecast
from edl_runtime.autoscale.traffic.windows import Size, Sizes, TrafficWindows, WindowSpan
from edl_runtime.cli.options import print_json, print_table, read_settings, split_list
from edl_runtime.errors import EdlError, SpecError
from edl_runtime.pods import format_amount
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

SHOWN = 6
"""How many windows are shown, the current one included."""

YEARS = range(1970, 3000)
"""Allowed years of --at."""


@click.command
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--total", default="", help="Capacity of the cluster, as in gpu=32,cpu=128.")
@click.option("--at", default="", help="A time in place of now, as in 2026-12-24T18:30, in the windows' time zone.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: current and next windows, and what the web needs.")
def windows(*, file: Path, total: str, at: str, as_json: bool) -> None:
    """Check the traffic windows in FILE, YAML or JSON, and show what training may use.

    A traffic source in it is read, too, for what the web needs and is expected to need. The learned profile is kept in
    the Redis of EDL_REDIS_URL, if that is set, as in a rescaling.

    A mistake is reported with its line and exit status 78. Exit status 1 when the source does not answer, or has no
    samples of the last day; the windows are shown all the same.
    """
    settings = read_settings()
    declared = read_windows(_text(file))
    whole = _total(total)
    now_s = time.time()
    moment = _moment(at, now_s, declared.time_zone)
    forecast, trouble = asyncio.run(_read_source(settings, declared, now_s))
    spans = _spans(declared, moment)
    room = _room(declared, whole, moment, _as_if_then(forecast, moment) if at else forecast)
    if as_json:
        print_json(_plain(moment, spans, room, whole, trouble))
    else:
        print_table(["FROM", "WINDOW", "CLUSTER", "JOBS", "POOLS"], [_row(span, declared, moment) for span in spans])
        click.echo(f"\n{f'{moment:%a %d %b %H:%M}' if at else 'now'}: {room.why}")
        if forecast and not at and (outlook := _describe_forecast(forecast, moment)):
            click.echo(outlook)
        for name, amount in whole.items():
            used = format_amount(room.capacity[name], name)
            click.echo(f"training may use {used} of {format_amount(amount, name)} {name}")
    if trouble:
        raise trouble


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError("FILE", str(file), f"a text in UTF-8 ({error.reason} at byte {error.start})") from None


async def _read_source(
    settings: RuntimeSettings, declared: TrafficWindows, now_s: float
) -> tuple[Forecast | None, EdlError | None]:
    """Return the forecast, if the windows have a source, or the error of the source."""
    if not (traffic := declared.traffic):
        return None, None
    async with connect(settings.redis_url) if settings.redis_url else nullcontext() as client:
        try:
            await check_source(traffic, client, now_s=now_s)
            return await fetch_forecast(traffic, client, settings.namespace, now_s, time_zone=declared.time_zone), None
        except EdlError as error:
            return None, error


def _total(text: str) -> dict[str, float]:
    whole = {}
    for word in split_list(text):
        name, _, amount = word.partition("=")
        try:
            whole[name] = float(amount)
        except ValueError:
            whole[name] = math.nan
        if not name or not 0 < whole[name] < math.inf:
            raise SpecError("total", word, "resources with numbers above 0, as in gpu=32,cpu=128")
    return whole


def _moment(at: str, now_s: float, time_zone: str) -> datetime:
    zone = zone_of(time_zone)
    if not at:
        return datetime.fromtimestamp(now_s, zone)
    try:
        moment = datetime.fromisoformat(at)
    except ValueError:
        raise SpecError("at", at, "a date and time, as in 2026-12-24T18:30") from None
    if moment.year not in YEARS:
        raise SpecError("at", at, f"a time of the years {YEARS[0]} to {YEARS[-1]}")
    return moment.astimezone(zone) if moment.tzinfo else moment.replace(tzinfo=zone)


def _spans(declared: TrafficWindows, moment: datetime) -> list[WindowSpan]:
    """Return the window at a moment, and the following ones."""
    spans = [declared.at(moment)]
    while len(spans) < SHOWN and (end := spans[-1].end) is not None:
        spans.append(declared.at(end))
    return spans


def _as_if_then(forecast: Forecast | None, moment: datetime) -> Forecast | None:
    """Return the forecast as of another time, assuming a current sample without a burst."""
    return forecast and msgspec.structs.replace(forecast, recent=(Sample(at_s=moment.timestamp(), needed=0.0),))


def _room(
    declared: TrafficWindows, whole: Mapping[str, float], moment: datetime, forecast: Forecast | None
) -> TrainingCapacity:
    """Return what training may use; a resource that --total does not name counts as unlimited."""
    enough = {forecast.resource: math.inf} if forecast else {}
    return training_capacity(declared, {**enough, **whole}, now=moment, forecast=forecast)


def _describe_forecast(forecast: Forecast, now: datetime) -> str:
    """Return what the web needed last, and its expected peak within a day."""
    slots = range(DAY_S // forecast.profile.slot_s)
    times = [now + timedelta(seconds=forecast.profile.slot_s * slot) for slot in slots]
    known = [(need, time) for time in times if (need := forecast.profile.expected(time.timestamp())) is not None]
    words = [
        f"it needed {format_amount(sample.needed, forecast.resource)} {forecast.resource} at {_clock(sample.at_s, now)}"
        for sample in forecast.recent
    ]
    if known:
        most, when = max(known, key=lambda each: each[0])
        about = format_amount(most, forecast.resource)
        words.append(f"most in the next 24 h will be about {about} at {_clock(when.timestamp(), now)}")
    return ", and ".join(words)


def _clock(at_s: float, now: datetime) -> str:
    return format_time(datetime.fromtimestamp(at_s, now.tzinfo), now)


def _row(span: WindowSpan, declared: TrafficWindows, moment: datetime) -> list[str]:
    start = span.start and span.start.astimezone(zone_of(declared.time_zone))
    since = f"{start:%a %d %b %H:%M}" if start else "ever"
    holds = span.start is None or span.start <= moment  # compared in UTC, because an hour of local time may repeat
    return [f"{since} (holds)" if holds else since, span.name, *(_sizes(each) for each in _each(span.sizes))]


def _each(sizes: Sizes) -> tuple[Mapping[str, Size], ...]:
    return sizes.cluster, sizes.jobs, sizes.pools


def _sizes(sizes: Mapping[str, Size]) -> str:
    return ", ".join(f"{size}" if name == "*" else f"{name} {size}" for name, size in sizes.items())


def _plain(
    moment: datetime,
    spans: Sequence[WindowSpan],
    room: TrainingCapacity,
    whole: Mapping[str, float],
    trouble: EdlError | None,
) -> dict[str, Any]:
    return {
        "at": moment,
        "windows": [
            {
                "window": span.name,
                "start": span.start,
                "end": span.end,
                **{
                    kind: {name: str(size) for name, size in sizes.items()}
                    for kind, sizes in zip(("cluster", "jobs", "pools"), _each(span.sizes), strict=True)
                },
            }
            for span in spans
        ],
        "why": room.why,
        "capacity": {name: room.capacity[name] for name in whole},
        "need": room.need,
        "trouble": str(trouble or ""),
    }
