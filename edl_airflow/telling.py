"""Tells a task's log how far its work is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from edl_airflow.decisions import View, lack
from edl_airflow.work import Work
from edl_runtime.backends.base import JobStatus
from edl_runtime.errors import RegistryUnavailableError
from edl_runtime.progress import Progress

Say = Callable[[str], None]

MOST_NAMED = 3
"""So many teachers are named in one line; how many more there are is said."""


class Reports(Protocol):
    """Where a student's reports are."""

    async def progress(self, job: str) -> Progress | None:
        """Return the job's last report. Raises RegistryUnavailableError."""
        ...


class Teller:
    """Says how far the work is: on each matter only what is new, and progress at most every `progress_every_s`.

    Who limits the speed is said when that changes, and each teacher is named once as one in quarantine: how many are
    there stands in the lines of progress.
    """

    def __init__(self, work: Work, say: Say) -> None:
        self._work = work
        self._say = say
        self._said: dict[str, str] = {}
        self._limit = ""
        self._quarantined: set[str] = set()
        self._next_at = 0.0

    async def tell(self, view: View, reports: Reports) -> None:
        """Say what is new. Never raises because Redis is away."""
        if view.pool and view.pool.reason:
            self._news("pool", f"Pool {view.pool.name!r}: {view.pool.reason}")
        if not view.student:
            self._news("teachers", f"Waiting for teachers of pool {self._work.pool!r}: {lack(self._work, view)}")
        elif time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + self._work.progress_every_s
            await self._tell_progress(view.student, reports)

    async def _tell_progress(self, student: JobStatus, reports: Reports) -> None:
        try:
            progress = await latest(student, reports)
        except RegistryUnavailableError as error:
            self._news("progress", f"{error}. The training goes on without progress shown here")
            return
        if progress:
            self._news("progress", progress.line())
            self._tell_troubles(progress)

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


def _named(quarantined: Mapping[str, str]) -> str:
    """Name teachers with the reasons, each of which may begin with the teacher's name, and be long."""
    said = [f"{who} ({why.removeprefix(f'{who}: ')})" for who, why in sorted(quarantined.items())[:MOST_NAMED]]
    more = len(quarantined) - len(said)
    return "; ".join([*said, f"and {more} more"] if more else said)


async def latest(student: JobStatus, reports: Reports) -> Progress | None:
    """Return the last report of this run of the job; an earlier run's may still lie in Redis."""
    progress = await reports.progress(student.name)
    return progress if progress and progress.updated_at >= student.created_at else None
