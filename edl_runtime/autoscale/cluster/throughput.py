"""Speed-up of jobs: measured at each pass, for the sizes that they have had.

With n instances a job does `c n / (1 + a (n - 1))` samples a second, so `n / speed` is a straight line in `n - 1`, and
`a` its slope by its value at 0: the method of least squares finds it from two sizes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from edl_runtime.autoscale.policy.model import Speedup
from edl_runtime.backends.interface import JobStatus
from edl_runtime.errors import EdlError, isolated
from edl_runtime.log import get_logger
from edl_runtime.progress import Progress
from edl_runtime.store import keys
from edl_runtime.store.redis_client import answers_of_each, decode_record, readable, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

STEADY_S = 30.0
"""Speeds count only this long after a job was started or resized."""

FRESH_S = 30.0
"""Reports that are older are ignored."""

KEPT_S = 7 * 24 * 3600
"""How long speeds are kept after the last measurement."""

log = get_logger(__name__)


def fit_speedup(speeds: Mapping[int, float]) -> Speedup | None:
    """Return the speed-up that best fits `speeds`, samples a second by size; None for fewer than two sizes."""
    points = [(instances - 1, instances / speed) for instances, speed in speeds.items() if instances >= 1 and speed > 0]
    if len(points) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    alone = mean_y - slope * mean_x
    return Speedup(a=1.0 if alone <= 0 else min(1.0, max(0.0, slope / alone)))


def steady_speed(job: JobStatus, report: Progress | None, now_s: float) -> float | None:
    """Return the samples a second of a job whose requested instances all train steadily; None otherwise."""
    since_s = max([job.created_at, *(one.started_at for one in job.instances)])
    if job.scaling and job.scaling.resized_at is not None:
        since_s = max(since_s, job.scaling.resized_at)
    running = sum(one.phase == "running" for one in job.instances)
    if report is None or not running == job.wanted == report.instances:
        return None
    if now_s - since_s < STEADY_S or abs(now_s - report.updated_at) > FRESH_S or report.samples_per_s <= 0:
        return None
    return report.samples_per_s


async def speedups(client: Redis, namespace: str, jobs: Sequence[JobStatus], now_s: float) -> dict[str, Speedup]:
    """Return the known speed-ups of elastic jobs by name, and store their current speeds.

    The stored speed of a size moves half-way to each new measurement. A job whose records can't be read is left out.
    Raises RegistryUnavailableError.
    """
    elastic = [job for job in jobs if job.elastic and not job.has_ended]
    if not elastic:
        return {}
    read = [(keys.progress(namespace, job.name), keys.speeds(namespace, job.name)) for job in elastic]
    async with client.pipeline(transaction=False) as reads:
        for progress, speeds in read:
            reads.get(progress)
            reads.hgetall(speeds)
        answers = await answers_of_each(client, reads, [(key,) for both in read for key in both])
    found: dict[str, Speedup] = {}
    written: list[tuple[str, int, float]] = []
    for job, (_, key), report, kept in zip(elastic, read, answers[::2], answers[1::2], strict=True):
        try:
            with isolated(f"the speed of job {job.name!r}"):
                known = _known(readable(kept))
                speed = steady_speed(job, decode_record(readable(report), Progress), now_s)
                if speed is not None:
                    known[job.wanted] = (known.get(job.wanted, speed) + speed) / 2
                    written.append((key, job.wanted, known[job.wanted]))
                if speedup := fit_speedup(known):
                    found[job.name] = speedup
        except EdlError as error:
            log.warning("speed.unreadable", job=job.name, cause=str(error))
    with unavailable_if_lost(client):
        async with client.pipeline(transaction=False) as writes:
            for key, instances, speed in written:
                writes.hset(key, str(instances), repr(speed))
                writes.expire(key, KEPT_S)
            await writes.execute()
    return found


def _known(kept: Mapping[str, str]) -> dict[int, float]:
    """Return the stored speeds by size, without damaged ones."""
    known = {}
    for instances, speed in kept.items():
        with suppress(ValueError):
            known[int(instances)] = float(speed)
    return known
