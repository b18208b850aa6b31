"""Fetches the forecast at each rescaling pass: recent samples of the traffic source, and a profile learned hourly."""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.autoscale.errors import SourceError
from edl_runtime.autoscale.traffic.forecast import (
    DAY_S,
    LEARN_EVERY_S,
    Forecast,
    Profile,
    Sample,
    latest_sample,
    learn_profile,
)
from edl_runtime.autoscale.traffic.sources.prometheus import PrometheusSource
from edl_runtime.autoscale.traffic.sources.records import CsvSource, StreamSource, TrafficSource, no_samples
from edl_runtime.autoscale.traffic.sources.spec import CsvFile, Prometheus, Traffic
from edl_runtime.errors import SpecError
from edl_runtime.settings import named_secret
from edl_runtime.store import keys
from edl_runtime.store.redis_client import decode_record, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

CHECK_SPAN_S = float(DAY_S)
"""`check_source` needs a sample of this time."""

NEVER_S = 0.0
"""`learned_s` of a profile that is to be learned at the next pass."""

PROFILE_TTL_S = 2 * DAY_S
"""How long a profile is kept in Redis after its last use."""


class LearnedProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A profile as it is kept in Redis, with the time it was learned and the latest sample."""

    learned_s: float
    profile: Profile
    latest: Sample | None = None


def open_source(traffic: Traffic, client: Redis | None) -> TrafficSource:
    """Return the reader of a source. Only a stream needs the `client`.

    Raises SpecError for a token whose variable is not set here, and for a stream without a Redis.
    """
    spec = traffic.source
    if isinstance(spec, CsvFile):
        return CsvSource(spec)
    if isinstance(spec, Prometheus):
        token = named_secret(os.environ, spec.token_env)
        if spec.token_env and not token:
            allowed = "the name of an environment variable that is set where the source is read"
            raise SpecError("traffic.prometheus.token_env", spec.token_env, allowed)
        return PrometheusSource(spec, token)
    if client is None:
        raise SpecError("traffic.redis.stream", spec.stream, "a stream in the Redis of EDL_REDIS_URL, which is not set")
    return StreamSource(spec, client)


async def check_source(traffic: Traffic, client: Redis | None = None, *, now_s: float) -> Sample:
    """Return the latest sample of the last day, as an amount of the resource.

    Raises SpecError for a mistake in the spec, as a query that can't be parsed or a missing file; NoSamplesError for a
    source without a sample of that day; SourceUnavailableError, or RegistryUnavailableError for a stream's Redis, for
    errors that may pass.
    """
    samples = traffic.needs(await open_source(traffic, client).samples(now_s - CHECK_SPAN_S, now_s))
    last = latest_sample(samples, now_s)
    if last is None:
        raise no_samples(
            "the traffic source", now_s - CHECK_SPAN_S, now_s, "all its samples are below 0, or no numbers"
        )
    return last


async def fetch_forecast(
    traffic: Traffic, client: Redis | None, namespace: str, now_s: float, *, time_zone: str = "UTC"
) -> Forecast:
    """Return the forecast: the latest sample of the source, and the profile.

    The profile is kept in Redis and learned again each LEARN_EVERY_S; without a `client` at each call. `time_zone` is
    that of the windows.

    An error of the source becomes the forecast's `trouble`, and earlier samples count until they are too old. Raises
    RegistryUnavailableError.
    """
    key = keys.traffic_profile(namespace, _digest(traffic, time_zone))
    kept = await _cached_profile(client, key) if client else None
    due = kept is None or not 0 <= now_s - kept.learned_s < LEARN_EVERY_S
    samples, trouble = (
        await _samples_or_trouble(traffic, client, now_s, traffic.forecast_options.memory_s) if due else ([], "")
    )
    if samples:
        # In a thread, because a month of minutes takes a while.
        kept = await asyncio.to_thread(_learn_profile, samples, traffic, time_zone, now_s)
    else:
        samples, silence = await _samples_or_trouble(traffic, client, now_s, traffic.forecast_options.silent_after_s)
        trouble = silence or trouble
    if kept is None:
        kept = _learn_profile([], traffic, time_zone, NEVER_S)
    last = latest_sample(samples, now_s) or kept.latest
    if samples and client:
        kept = msgspec.structs.replace(kept, latest=last)
        with unavailable_if_lost(client):
            await client.set(key, msgspec.json.encode(kept), ex=PROFILE_TTL_S)
    return Forecast(
        resource=traffic.resource,
        profile=kept.profile,
        recent=(last,) if last else samples[-1:],
        forecast_options=traffic.forecast_options,
        trouble=trouble,
    )


async def _samples_or_trouble(
    traffic: Traffic, client: Redis | None, now_s: float, span_s: float
) -> tuple[list[Sample], str]:
    """Return the samples of the last seconds, or none and the error."""
    try:
        return traffic.needs(await open_source(traffic, client).samples(now_s - span_s, now_s)), ""
    except (SourceError, SpecError) as error:
        return [], str(error)


async def _cached_profile(client: Redis, key: str) -> LearnedProfile | None:
    with unavailable_if_lost(client, key):
        return decode_record(await client.get(key), LearnedProfile)


def _learn_profile(samples: list[Sample], traffic: Traffic, time_zone: str, now_s: float) -> LearnedProfile:
    profile = learn_profile(samples, now_s=now_s, forecast_options=traffic.forecast_options, time_zone=time_zone)
    return LearnedProfile(learned_s=now_s, profile=profile)


def _digest(traffic: Traffic, time_zone: str) -> str:
    """Return a key that changes with everything a profile depends on."""
    return hashlib.sha256(msgspec.json.encode((traffic, time_zone))).hexdigest()[:16]
