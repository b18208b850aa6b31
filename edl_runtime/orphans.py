"""Jobs whose tasks have left them: which those are, and what was noted of them in Redis, for all who show jobs.

Airflow stops nothing of a task that is ended while its triggerer is dead. So who follows other jobs of the connection
asks Airflow for the states of all jobs' tasks, notes orphans here, and ends them after a grace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.backends.interface import JobStatus, Origin
from edl_runtime.elastic.rendezvous.redis_store import Event, announce
from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError
from edl_runtime.store.redis_client import answers_of_each, decode_record, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

GONE = "gone"
"""The state of a task instance that its Airflow does not know any more, as it was deleted with its run."""

OVER = frozenset({GONE, "success", "failed", "upstream_failed", "skipped", "removed"})
"""States of task instances that need their jobs no more. A task without a state waits, as one that was cleared."""

GRACE_S = 180.0
"""How long a job is an orphan before it is ended: meanwhile its task may still be stopping it, or may be cleared."""

NOTE_KEPT_S = 3600
"""How long a note is kept."""

MOST_BYTES = 1 << 16
"""Of a note; a longer one can't be read."""


class Orphan(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose task has left it.

    - `token`: of the job. A try that adopts the job has another one, so this holds for it no more.
    - `why`: whose task it was, and what became of that. `since`: when that was first seen, in Unix seconds.
    """

    token: str
    why: str
    since: float

    def is_over(self, now: float) -> bool:
        """Whether its grace is over."""
        return now >= self.since + GRACE_S


def find_orphans(
    jobs: Iterable[JobStatus],
    states: Mapping[Origin, str | None],
    noted: Mapping[str, Orphan],
    now: float,
) -> dict[str, Orphan]:
    """Return the orphans among these jobs, by name; those that are `noted` since then, the others since now. Pure.

    `states`: of the task instances, by Airflow or GONE. A job whose origin is not in it is no orphan.
    """
    found = {}
    for job in jobs:
        if job.origin and job.origin in states and (why := why_left(job.origin, states[job.origin])):
            known = noted.get(job.name)
            since = known.since if known and known.token == job.token else now
            found[job.name] = Orphan(token=job.token, why=why, since=since)
    return found


def why_left(origin: Origin, state: str | None) -> str:
    """Return why nobody needs the job of a task in this state, empty if somebody does. Pure.

    A pool that outlives its task also outlives the record of its run.
    """
    if state not in OVER or (origin.outlives_task and state in ("success", GONE)):
        return ""
    return f"{origin} {'exists no more' if state == GONE else f'is {state}'}"


# Notes, in Redis.


async def is_to_look(client: Redis, namespace: str, place: str, airflow: str, *, every_s: float) -> bool:
    """Return whether nobody else of this Airflow has looked at the place's jobs within about `every_s`.

    The caller is to look then, as hundreds of tasks may follow jobs. Raises RegistryUnavailableError.
    """
    key = keys.orphans_look(namespace, place, airflow)
    with unavailable_if_lost(client, key):
        return bool(await client.set(key, "", nx=True, px=round(900 * every_s)))


async def read_notes(client: Redis, namespace: str, jobs: Sequence[JobStatus]) -> dict[str, Orphan]:
    """Return those of these jobs that were noted as orphans, by name. Raises RegistryUnavailableError."""
    asked = [job for job in jobs if job.origin]
    reading = [keys.orphan(namespace, job.name) for job in asked]
    async with client.pipeline(transaction=False) as commands:
        for key in reading:
            commands.getrange(key, 0, MOST_BYTES)
        contents = await answers_of_each(client, commands, [(key,) for key in reading])
    notes = [None if isinstance(each, MalformedRecordError) else decode_record(each, Orphan) for each in contents]
    pairs = zip(asked, notes, strict=True)
    return {job.name: note for job, note in pairs if note and note.token == job.token}


async def note_orphan(client: Redis, namespace: str, job: str, orphan: Orphan) -> None:
    """Note a job as an orphan, also among its events. Raises RegistryUnavailableError."""
    with unavailable_if_lost(client):
        await client.set(keys.orphan(namespace, job), msgspec.json.encode(orphan), ex=NOTE_KEPT_S)
    await announce(client, namespace, job, Event(kind="orphan", reason=orphan.why))


async def forget_orphan(client: Redis, namespace: str, job: str, *, ended: str = "") -> None:
    """Forget a note, as its task was cleared; or as the job was `ended`, and why. Raises RegistryUnavailableError."""
    if ended:
        await announce(client, namespace, job, Event(kind="orphan", reason=f"stopped, as {ended}"))
    with unavailable_if_lost(client):
        await client.delete(keys.orphan(namespace, job))
