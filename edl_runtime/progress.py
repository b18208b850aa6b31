"""How far a job is: written by the student, read by Airflow and the `edl` command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from edl_runtime.store import keys
from edl_runtime.store.redis_client import decode_record, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

KEPT_S = 3600
"""How long a report outlives its writer."""

READER_ALIVE_S = 5.0
"""A reader whose report is so much older than the job's is no more."""

LOGGED_AS = "job.progress"
LIMIT_LOGGED_AS = "job.limit"
"""The events by which a student's own log has its progress, and who limits it."""

MOST_SHARES = 4
"""So many teachers' shares stand in a line."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A job's last report. Rates and shares are those of the last ten seconds; shares go from 0 to 1.

    - `step`: batches trained; `total_steps`: of how many, None while unknown.
    - `samples_per_s`, `time_left_s`, `loss`: a second; seconds or None; what the script says or None.
    - `teachers`: teachers in use, without those in quarantine.
    - `answered`: requests answered by each teacher so far, address → count; `shares`: each one's part of them lately.
    - `cached`: samples so far that no teacher was asked about, for the cache had the answers.
    - `waiting`: share of its time that the student waited for its next batch.
    - `busy`: share of their time that the student asked its teachers something.
    - `queued`: requests that wait for a teacher now.
    - `retries`, `hedges`: requests that another teacher was asked, too, so far; see `ReaderStats`.
    - `quarantined`: teachers that are asked nothing for a while, address → why.
    - `limit`: who could change the speed: "teachers", "answers", "source", "student" or "balanced", "no_answer"
      when no teacher answers, and "" while that is not known; see `verdict`.
    - `instances`, `generation`: how many trainers train together, and in which generation; 0 where they don't.
    - `run`: which run of the job this is, of several instances that train together; see `publish_reader_progress`.
    - `note`: what is being done, in the script's own words ("seed 2 of 3, distilled").
    - `updated_at`: Unix seconds of the student's clock.

    Reports of other versions can be read: what they don't have is at its default here.
    """

    step: int
    updated_at: float
    total_steps: int | None = None
    epoch: int = 0
    loss: float | None = None
    samples_per_s: float = 0.0
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

    def line(self) -> str:
        """Return this report as one line for a log, without what is zero."""
        words = [
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
        return " · ".join(word for word in words if word)

    def verdict(self) -> str:
        """Say in a sentence who is the limit, and what that means; empty while it is not known."""
        waits = f"the student waits {_percent(self.waiting)} of the time"
        idle = _percent(1 - self.busy)
        connected = _count(self.teachers, "is", "are") or "none is"
        resting = _count(len(self.quarantined), "is", "are")
        too = f", and {resting} in quarantine" if resting else ""
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
        if not count and (self.waiting or self.queued):  # else they are not missed
            return "no teacher"
        shares = sorted(self.shares.values(), reverse=True)
        if self.teachers < 2 or not 0 < len(shares) <= self.teachers:  # some of those are no more
            return count
        shares += [0.0] * (self.teachers - len(shares))
        shown = "/".join(f"{100 * share:.0f}" for share in shares[:MOST_SHARES])
        return f"{count} ({shown}{'/…' if len(shares) > MOST_SHARES else ''} %)"


def _count(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}" if count else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


async def publish_progress(client: Redis, namespace: str, job: str, progress: Progress) -> None:
    """Replace the job's last report; it is kept for an hour. Raises RegistryUnavailableError."""
    with unavailable_if_lost(client):
        await client.set(keys.progress(namespace, job), msgspec.json.encode(progress), ex=KEPT_S)


async def publish_reader_progress(
    client: Redis, namespace: str, job: str, progress: Progress, *, run: str, instance: int
) -> None:
    """Replace the last report of an instance's reader, where the job's own comes from the agents: `read` adds it.

    Raises RegistryUnavailableError.
    """
    key = keys.readers_progress(namespace, job, run)
    with unavailable_if_lost(client):
        async with client.pipeline(transaction=True) as both:
            both.hset(key, str(instance), msgspec.json.encode(progress).decode())
            both.expire(key, KEPT_S)
            await both.execute()


async def read_progress(client: Redis, namespace: str, job: str) -> Progress | None:
    """Return the job's last report, None when there is none within the hour; with what its instances' readers say.

    Raises RegistryUnavailableError.
    """
    with unavailable_if_lost(client):
        content = await client.get(keys.progress(namespace, job))
        progress = decode_record(content, Progress)
        if progress is None:
            return None
        found: Any = client.hvals(keys.readers_progress(namespace, job, progress.run)) if progress.run else None
        readers = await found if found else []
    return with_reader_progress(progress, [said for reader in readers if (said := decode_record(reader, Progress))])


def progress_of_run(progress: Progress | None, began_at: float) -> Progress | None:
    """Return a job's last report, None where an earlier run of the job has left it.

    `began_at`: when this run was created, in Unix seconds. A job of the same name is another run after each clear and
    retry, and the report of the one before stays in Redis until the new one has made a step.
    """
    return progress if progress and progress.updated_at >= began_at else None


def is_progress_line(line: str, job: str) -> bool:
    """Whether a line of the job's log is its student's own report of progress, however structlog is configured."""
    return job in line and (LOGGED_AS in line or LIMIT_LOGGED_AS in line)


def with_reader_progress(progress: Progress, readers: Sequence[Progress]) -> Progress:
    """Return a job's report with what the readers of its instances say: counts of all, the rest of those alive now.

    Who limits the speed is what the reader that waits longest says, since the others wait for its instance.
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
        quarantined={who: why for reader in alive for who, why in reader.quarantined.items()},
        waiting=slowest.waiting if slowest else 0.0,
        busy=slowest.busy if slowest else 0.0,
        limit=slowest.limit if slowest else "",
    )
