"""Tells a task's log how far its work is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol, Self

from edl_airflow.decisions import View, lack
from edl_airflow.joblog import JobLog, Logs
from edl_airflow.work import Work
from edl_runtime.backends.base import JobStatus
from edl_runtime.errors import RegistryUnavailableError
from edl_runtime.progress import Progress, of_run

Say = Callable[[str], None]

MOST_NAMED = 3
"""So many teachers are named in one line; how many more there are is said."""


class Reports(Protocol):
    """Where a job's reports are."""

    async def progress(self, job: str) -> Progress | None:
        """Return the job's last report. Raises RegistryUnavailableError."""
        ...


class Source(Reports, Logs, Protocol):
    """Where both its reports and what it writes are."""


class Teller:
    """Says how far the work is, and what the job writes: only what is new, and at most every `progress_every_s`.

    Who limits the speed is said when that changes, and each teacher is named once as one in quarantine: how many are
    there stands in the lines of progress. Used as a context: it reads the job's log meanwhile.
    """

    def __init__(self, work: Work, source: Source, say: Say) -> None:
        self._work = work
        self._source = source
        self._say = say
        self._log: JobLog | None = None
        self._said: dict[str, str] = {}
        self._limit = ""
        self._quarantined: set[str] = set()
        self._lost_teachers: set[str] = set()
        self._next_at = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._log:
            await self._log.close()

    async def tell(self, view: View) -> None:
        """Say what is new. Never raises because Redis is away."""
        if view.pool:
            self._tell_of_pool(view.pool)
        if not view.trainer:
            self._news("teachers", f"Waiting for teachers of pool {self._work.pool!r}: {lack(self._work, view)}")
            return
        await self._log_of(view.trainer).tell_disruptions(view.trainer)
        if not view.trainer.has_ended:
            self._tell_reason("trainer", f"{view.trainer.name!r}", view.trainer)
        await self._log_of(view.trainer).tell()
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + self._work.progress_every_s
            await self._tell_progress(view.trainer)

    async def finish(self, view: View, *, is_over: bool) -> None:
        """Say what the job wrote last, and how far it came, unless it is a later try's by now.

        `is_over`: it writes no more.
        """
        if view.trainer and view.trainer.token == self._work.token:
            await self._log_of(view.trainer).finish(is_over=is_over)
            with suppress(RegistryUnavailableError):
                self._tell_of(await latest(view.trainer, self._source))

    def _log_of(self, job: JobStatus) -> JobLog:
        self._log = self._log or JobLog(job, self._source, self._say, self._work.progress_every_s)
        return self._log

    def _tell_of_pool(self, pool: JobStatus) -> None:
        """Say which teachers the cluster has ended, each once, and how many it has by now: others take their places.

        Of many that are new, the last few are named.
        """
        ended = {**pool.replaced, **{one.pod: one.reason for one in pool.instances if one.disrupted}}
        new = [pod for pod in ended if pod not in self._lost_teachers]
        counted = enumerate(new, start=len(self._lost_teachers) + 1)
        self._lost_teachers.update(new)
        for count, pod in list(counted)[-MOST_NAMED:]:
            self._say(f"Pool {pool.name!r}: {ended[pod]}: {count} by now")
        self._tell_reason("pool", f"Pool {pool.name!r}", pool)

    async def _tell_progress(self, job: JobStatus) -> None:
        try:
            progress = await latest(job, self._source)
        except RegistryUnavailableError as error:
            self._news("progress", f"{error}. The training goes on without progress shown here")
            return
        self._tell_of(progress)

    def _tell_of(self, progress: Progress | None) -> None:
        if progress:
            self._news("progress", progress.line())
            self._tell_troubles(progress)

    def _tell_reason(self, matter: str, who: str, job: JobStatus) -> None:
        """Say what is wrong with a job, once; what is over and comes again is news again."""
        if not job.reason:
            self._said.pop(matter, None)
        elif not _is_disruption(job):
            self._news(matter, f"{who}: {job.reason}")

    def _tell_troubles(self, progress: Progress) -> None:
        verdict = progress.verdict()
        if verdict and progress.limit != self._limit:
            self._limit = progress.limit
            self._say(f"step {progress.step} · {verdict}")
        unnamed = {who: why for who, why in progress.quarantined.items() if who not in self._quarantined}
        if unnamed:
            self._quarantined |= unnamed.keys()
            self._say(f"step {progress.step} · in quarantine: {_named(unnamed)}")

    def _news(self, matter: str, line: str) -> None:
        if self._said.get(matter) != line:
            self._said[matter] = line
            self._say(line)


def _is_disruption(job: JobStatus) -> bool:
    """Whether its reason is that the cluster has ended an instance, which is said by itself."""
    return any(one.disrupted and one.reason == job.reason for one in job.instances)


def _named(quarantined: Mapping[str, str]) -> str:
    """Name teachers with the reasons, each of which may begin with the teacher's name, and be long."""
    said = [f"{who} ({why.removeprefix(f'{who}: ')})" for who, why in sorted(quarantined.items())[:MOST_NAMED]]
    more = len(quarantined) - len(said)
    return "; ".join([*said, f"and {more} more"] if more else said)


async def latest(job: JobStatus, reports: Reports) -> Progress | None:
    """Return the last report of this run of the job; an earlier run's may still lie in Redis."""
    return of_run(await reports.progress(job.name), job.created_at)
