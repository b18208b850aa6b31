"""Tells a task's log how far its work is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from edl_airflow.decisions import View, lack
from edl_airflow.work import Work
from edl_runtime.backends.base import JobStatus
from edl_runtime.errors import RegistryUnavailableError
from edl_runtime.progress import Progress

Say = Callable[[str], None]


class Reports(Protocol):
    """Where a student's reports are."""

    async def progress(self, job: str) -> Progress | None:
        """Return the job's last report. Raises RegistryUnavailableError."""
        ...


class Teller:
    """Says how far the work is: on each matter only what is new, and progress at most every `progress_every_s`."""

    def __init__(self, work: Work, say: Say) -> None:
        self._work = work
        self._say = say
        self._said: dict[str, str] = {}
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

    def _news(self, matter: str, line: str) -> None:
        if self._said.get(matter) != line:
            self._said[matter] = line
            self._say(line)


async def latest(student: JobStatus, reports: Reports) -> Progress | None:
    """Return the last report of this run of the job; an earlier run's may still lie in Redis."""
    progress = await reports.progress(student.name)
    return progress if progress and progress.updated_at >= student.created_at else None
