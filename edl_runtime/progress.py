"""The progress of a job, its last report and its curve: by its student or agents, for Airflow and the `edl` command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError
from edl_runtime.store.redis_client import (
    answers_of_each,
    decode_record,
    readable,
    run_script,
    run_script_on_each,
    unavailable_if_lost,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

KEPT_S = 3600
"""How long a report is kept after its last update."""

CURVE_KEPT_S = 24 * 3600
"""How long a curve outlives its last report, as a job that is suspended over night."""

MOST_POINTS = 1000
"""Points of a curve. When there are as many, at least a quarter of them stay, over the whole length."""

POINT_METRICS = 20
"""Metrics in a point; the rest is left out."""

READER_ALIVE_S = 5.0
"""A reader whose report is this much older than the job's has ended."""

LOGGED_AS = "job.progress"
LIMIT_LOGGED_AS = "job.limit"
"""The log events by which a student reports its progress, and what limits it."""

MOST_BYTES = 1 << 20
"""Of a report; a longer one can't be read, as all jobs' reports are read at once."""

MOST_READERS = 10_000
MOST_READERS_BYTES = 4 << 20
"""Of the reports of a job's readers; what does not fit in is left out."""

MOST_CURVE_BYTES = 4 << 20
"""Of a curve; points that do not fit in are left out, those of earlier steps first."""

MAX_SHARES = 4
"""Teachers' shares in a line."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A job's last report. Rates and shares are those of the last ten seconds; shares are from 0 to 1.

    - `step`: trained batches; `total_steps`: all batches, None if unknown.
    - `loss`: as reported by the script, or None; `metrics`: what it gives to `run.metrics`.
    - `step_s`: how long a step usually takes, 0 if unknown.
    - `teachers`: teachers in use, without those in quarantine.
    - `answered`: requests that each teacher has answered, by address; `shares`: each one's share of the last ones.
    - `cached`: samples whose answers came from the cache.
    - `waiting`: share of the student's time in which it waited for a batch.
    - `busy`: share of the teachers' time in which this student's requests were running.
    - `queued`: requests that wait for a teacher now.
    - `retries`, `hedges`: requests that were sent to a second teacher; see `ReaderStats`.
    - `quarantined`: teachers that get no requests for a while, address → reason.
    - `limit`: what limits the speed: "teachers", "answers", "source", "student" or "balanced", "no_answer" if no
      teacher answers, and "" if unknown; see `verdict`.
    - `instances`, `generation`: how many trainers train together, and their generation; 0 for other jobs.
    - `run`: the id of this run of a job with several instances; see `publish_reader_progress`.
    - `note`: a text from the script, such as "seed 2 of 3, distilled".
    - `updated_at`: Unix seconds of the student's clock.

    Fields that a report of another version lacks have their defaults.
    """

    step: int
    updated_at: float
    total_steps: int | None = None
    epoch: int = 0
    loss: float | None = None
    metrics: dict[str, float] = {}
    samples_per_s: float = 0.0
    step_s: float = 0.0
    teachers: int = 0
    answered: dict[str, int] = {}
    shares: dict[str, float] = {}
    cached: int = 0
    waiting: float = 0.0
    busy: float = 0.0
    queued: int = 0
    retries: int = 0
    hedges: int = 0
    quarantined: dict[str, str] = {}
    limit: str = ""
    time_left_s: float | None = None
    instances: int = 0
    generation: int = 0
    run: str = ""
    note: str = ""

    @property
    def share(self) -> float | None:
        """The share of all steps that is done, 0 to 1; None while the number of all steps is unknown."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else None

    def line(self) -> str:
        """Return this report as one line for a log, without fields that are zero."""
        parts = [
            f"step {self.step}/{self.total_steps}" if self.total_steps else f"step {self.step}",
            "" if self.loss is None else f"loss {self.loss:.4f}",
            f"{self.samples_per_s:,.0f} samples/s",
            _count(self.instances, "instance", "instances"),
            self._teachers(),
            f"{self.cached:,} from the cache" if self.cached else "",
            f"waits {_percent(self.waiting)}" if round(100 * self.waiting) else "",
            f"{self.queued:,} queued" if self.queued else "",
            _count(self.retries, "retry", "retries"),
            _count(self.hedges, "hedge", "hedges"),
            f"{len(self.quarantined)} in quarantine" if self.quarantined else "",
            "" if self.time_left_s is None else f"{_clock(self.time_left_s)} left",
            self.note,
        ]
        return " · ".join(filter(None, parts))

    def verdict(self) -> str:
        """Return a sentence about what limits the speed; "" if that is unknown."""
        waits = f"the student waits {_percent(self.waiting)} of the time"
        idle = _percent(1 - self.busy)
        connected = _count(self.teachers, "is", "are") or "none is"
        quarantined = _count(len(self.quarantined), "is", "are")
        too = f", and {quarantined} in quarantine" if quarantined else ""
        return {
            "teachers": f"the teachers are the limit: {waits}; more teachers would help{too}",
            "answers": f"{waits} for answers, but teachers are idle {idle} of it; more teachers would not help{too}",
            "source": f"the source is the limit: {waits}, mostly for its own data; more teachers would not help",
            "student": f"the student is the limit: teachers are idle {idle} of the time",
            "balanced": f"balanced: {waits}, and teachers are busy",
            "no_answer": f"no teacher answers: {connected} connected{too}; the student waits",
        }.get(self.limit, "")

    def _teachers(self) -> str:
        count = _count(self.teachers, "teacher", "teachers")
        if not count and (self.waiting or self.queued):  # else it needs none at the moment
            return "no teacher"
        shares = sorted(self.shares.values(), reverse=True)
        if self.teachers < 2 or not 0 < len(shares) <= self.teachers:  # some of those have left
            return count
        shares += [0.0] * (self.teachers - len(shares))
        shown = "/".join(f"{100 * share:.0f}" for share in shares[:MAX_SHARES])
        return f"{count} ({shown}{'/…' if len(shares) > MAX_SHARES else ''} %)"


def _count(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}" if count else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job's progress at one step, `at` a time in Unix seconds; the fields are those of `Progress`."""

    step: int
    at: float
    epoch: int = 0
    loss: float | None = None
    samples_per_s: float = 0.0
    instances: int = 0
    metrics: dict[str, float] = {}


async def publish_progress(client: Redis, namespace: str, job: str, progress: Progress) -> None:
    """Replace the job's last report, kept for an hour, and add it to the curve. Raises RegistryUnavailableError.

    A report of an earlier generation than the last one is dropped.
    """
    point = CurvePoint(
        step=progress.step,
        at=progress.updated_at,
        epoch=progress.epoch,
        loss=progress.loss,
        samples_per_s=round(progress.samples_per_s, 3),
        instances=progress.instances,
        metrics=dict(islice(progress.metrics.items(), POINT_METRICS)),
    )
    where = [keys.progress(namespace, job), keys.progress_curve(namespace, job)]
    report, as_point = (msgspec.json.encode(each).decode() for each in (progress, point))
    position: list[str | int] = [progress.run, progress.generation, progress.step]
    await run_script(
        client, "progress_publish", where, [report, *position, as_point, KEPT_S, CURVE_KEPT_S, MOST_POINTS]
    )


async def read_curve(client: Redis, namespace: str, job: str, *, most: int = MOST_POINTS) -> list[CurvePoint]:
    """Return the curve of the job's progress by step, empty if there is none; of more points than `most`, every n-th.

    The last point is always there. It is kept for a day, and continues when the job is started again from a checkpoint.
    Raises RegistryUnavailableError.
    """
    key = keys.progress_curve(namespace, job)
    contents = await run_script(client, "progress_curve", [key], [MOST_POINTS, MOST_CURVE_BYTES])
    points = [point for point in (decode_record(content, CurvePoint) for content in reversed(contents)) if point]
    every = -(-len(points) // most)
    return points[::-every][::-1] if points else []


async def publish_reader_progress(
    client: Redis, namespace: str, job: str, progress: Progress, *, run: str, instance: int
) -> None:
    """Replace the report of one instance's reader, for a job whose own report comes from its agents.

    `read_progress` merges the two. Raises RegistryUnavailableError.
    """
    key = keys.readers_progress(namespace, job, run)
    with unavailable_if_lost(client, key):
        async with client.pipeline(transaction=True) as both:
            both.hset(key, str(instance), msgspec.json.encode(progress).decode())
            both.expire(key, KEPT_S)
            await both.execute()


async def read_progress(client: Redis, namespace: str, job: str) -> Progress | None:
    """Return the job's last report, merged with those of its instances' readers; None if there is none.

    Raises RegistryUnavailableError.
    """
    return readable((await read_each_progress(client, namespace, [job])).get(job))


async def read_each_progress(
    client: Redis, namespace: str, jobs: Sequence[str]
) -> dict[str, Progress | MalformedRecordError]:
    """Return the last reports of these jobs, by name, as `read_progress`; jobs without one are left out.

    Of a job whose keys hold something else the error is returned. Two round trips for all of them. Raises
    RegistryUnavailableError.
    """
    found: dict[str, Progress | MalformedRecordError] = {}
    async with client.pipeline(transaction=False) as asked:
        reading = [keys.progress(namespace, job) for job in jobs]
        for key in reading:
            asked.getrange(key, 0, MOST_BYTES)
        for job, content in zip(jobs, await answers_of_each(client, asked, [(key,) for key in reading]), strict=True):
            report = content if isinstance(content, MalformedRecordError) else decode_record(content, Progress)
            if report:
                found[job] = report
        of_runs = {job: report for job, report in found.items() if isinstance(report, Progress) and report.run}
    reading = [keys.readers_progress(namespace, job, report.run) for job, report in of_runs.items()]
    limits = [MOST_READERS, MOST_READERS_BYTES]
    readers = await run_script_on_each(client, "progress_readers", [(key,) for key in reading], limits)
    for (job, report), records in zip(of_runs.items(), readers, strict=True):
        if isinstance(records, MalformedRecordError):
            found[job] = records
            continue
        reports = [decode_record(record, Progress) for record in records]
        found[job] = with_reader_progress(report, [each for each in reports if each])
    return found


def progress_of_run(progress: Progress | None, began_at: float) -> Progress | None:
    """Return a job's last report, None if an earlier run of the job wrote it.

    `began_at`: when this run was created, in Unix seconds. After a clear or a retry the earlier run's report stays in
    Redis until the new run has made a step.
    """
    return progress if progress and progress.updated_at >= began_at else None


def is_progress_line(line: str, job: str) -> bool:
    """Whether a line of the job's log is a progress report of its student, in any format of structlog."""
    return job in line and (LOGGED_AS in line or LIMIT_LOGGED_AS in line)


def with_reader_progress(progress: Progress, readers: Sequence[Progress]) -> Progress:
    """Return a job's report with those of its instances' readers: counts of all readers, the rest of running ones.

    The limit is that of the reader that waits longest, because the other instances wait for its instance.
    """
    if not readers:
        return progress
    alive = [reader for reader in readers if reader.updated_at >= progress.updated_at - READER_ALIVE_S]
    slowest = max(alive, key=lambda reader: reader.waiting, default=None)
    answered = Counter[str]()
    for reader in readers:
        answered.update(reader.answered)
    return msgspec.structs.replace(
        progress,
        answered=dict(answered),
        cached=sum(reader.cached for reader in readers),
        retries=sum(reader.retries for reader in readers),
        hedges=sum(reader.hedges for reader in readers),
        queued=sum(reader.queued for reader in alive),
        teachers=max((reader.teachers for reader in alive), default=0),
        quarantined={address: reason for reader in alive for address, reason in reader.quarantined.items()},
        waiting=slowest.waiting if slowest else 0.0,
        busy=slowest.busy if slowest else 0.0,
        limit=slowest.limit if slowest else "",
    )
