"""Follows a pool of teachers, in Redis or through a discovery endpoint, and reports the student's demand to it."""

from __future__ import annotations

import asyncio
import math
import os
import random
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NamedTuple

from edl_runtime.concurrency import first_completed
from edl_runtime.discovery.assignments import REPORT_EVERY_S, Assignment, StudentRegistry, StudentSession
from edl_runtime.discovery.client import DiscoveryClient, follow_assignments
from edl_runtime.discovery.errors import DiscoveryNotReadyError
from edl_runtime.distill.teacher_addresses import Discovered
from edl_runtime.log import get_logger
from edl_runtime.meter import WINDOW_S, RateMeter
from edl_runtime.pool_reports import StudentReport
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.errors import other_pools
from edl_runtime.registry.members import Member, student_id
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.errors import RegistryTimeoutError, RegistryUnavailableError
from edl_runtime.store.redis_client import connect

ASK_AGAIN_S = 2.0
"""The longest pause before a registry or endpoint that was not ready is asked again."""

log = get_logger(__name__)

OnTeachers = Callable[[Collection[str]], None]
"""Takes the addresses of the teachers to use from now on."""

OnUnavailable = Callable[[str], None]
"""Takes the reason why teachers can't be found."""

OnAssignment = Callable[[Assignment], None]

MakeReport = Callable[[], StudentReport]
"""Returns the student's demand, and its teachers in quarantine."""


async def follow_pool(
    teachers: Discovered,
    settings: RuntimeSettings,
    on_teachers: OnTeachers,
    on_unavailable: OnUnavailable,
    make_report: MakeReport,
) -> None:
    """Join the pool as a student and call `on_teachers` whenever the teachers to use change, until cancelled.

    Publishes what `make_report` returns about once a second.

    While Redis or the endpoint is unavailable, the teachers in use stay in use. If it is at the start, this raises
    RegistryUnavailableError or DiscoveryUnavailableError; if the endpoint refuses, DiscoveryRefusedError. If it is only
    slow, or the endpoint answers 5xx, as while its Redis is away, this calls `on_unavailable` and tries again: the
    reader has its own limit for waiting for teachers, EDL_TEACHER_WAIT_S.
    """
    me = Member(
        id=student_id(settings.job, settings.instance),
        address=f"{socket.gethostname()}:{os.getpid()}",
        want=teachers.at_most,
    )
    follow_teachers = _follow_registry if settings.redis_url else _follow_endpoint
    in_use: tuple[str, ...] | None = None

    def on_assignment(assignment: Assignment) -> None:
        nonlocal in_use
        if assignment.teachers != in_use:
            in_use = assignment.teachers
            log.info("teachers.assigned", teachers=in_use, students=assignment.students, listed=assignment.listed)
            on_teachers(in_use)

    while True:
        try:
            await follow_teachers(
                teachers.pool, me, settings, on_assignment, on_unavailable=on_unavailable, make_report=make_report
            )
        except (RegistryTimeoutError, DiscoveryNotReadyError) as error:
            on_unavailable(str(error))
            log.warning("registry.unavailable", pool=teachers.pool, cause=str(error))
            await asyncio.sleep(ASK_AGAIN_S * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret


async def _follow_endpoint(
    pool: str,
    me: Member,
    settings: RuntimeSettings,
    on_assignment: OnAssignment,
    *,
    on_unavailable: OnUnavailable,  # noqa: ARG001 - an endpoint does not tell which pools there are
    make_report: MakeReport,
) -> None:
    async with DiscoveryClient(settings.discovery_url, settings.discovery_token) as client:
        await follow_assignments(client, pool, me, on_assignment, make_report)


async def _follow_registry(
    pool: str,
    me: Member,
    settings: RuntimeSettings,
    on_assignment: OnAssignment,
    *,
    on_unavailable: OnUnavailable,
    make_report: MakeReport,
) -> None:
    async with connect(settings.redis_url) as client:

        async def use_each() -> None:
            async for assignment in session.assignments():
                on_assignment(assignment)
                if not assignment.listed:
                    others = ""
                    with suppress(RegistryUnavailableError):  # an outage ends no training
                        known = await Directory(client, settings.namespace).known_pools()
                        others = f", and {other_pools(pool, settings.namespace, known)}"
                    on_unavailable(f"no teacher is registered{others}")

        registry = StudentRegistry(client, settings.namespace, ttl_s=settings.lease_ttl_s, most_pools=1)
        async with registry.connect(pool, me) as session:
            await first_completed(use_each(), _report_to(session, make_report), session.pool.ended())


async def _report_to(session: StudentSession, make_report: MakeReport) -> None:
    while True:
        session.note_report(make_report())
        await asyncio.sleep(REPORT_EVERY_S)


# The student's demand, reported to the pool

PAUSE_BATCHES = 4
MIN_PAUSE_S = 2.0
"""A script that takes nothing for `MIN_PAUSE_S` and the time of `PAUSE_BATCHES` batches pauses."""
LONGEST_PAUSE_S = 60.0
"""A longer pause counts as the end of reading."""


class PoolCounts(NamedTuple):
    """A reader's counts for one pool.

    - `connected`: the addresses of the teachers in use.
    - `in_flight`, `queued`: requests at teachers, and those that wait for one.
    - `waited_s`: how long the script has waited for this pool's answers; `asked_s`: how long teachers have had
      requests, summed over teachers; `batches`, `samples`: what the script took. These only grow.
    """

    connected: frozenset[str]
    in_flight: int
    queued: int
    waited_s: float
    asked_s: float
    batches: int
    samples: int


_GROWING = ("waited_s", "asked_s", "batches", "samples")


class DemandMeter:
    """Makes a student's reports to one pool, from what `counts` returns. `want`: the most teachers it can use."""

    def __init__(
        self, counts: Callable[[], PoolCounts], want: int | None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._counts = counts
        self._want = want
        self._clock_s = clock_s
        self._before: PoolCounts | None = None
        self._since = 0.0
        self._active_at = 0.0
        self._pause_s = math.inf
        self._meters: dict[str, RateMeter] = {}

    def report(self, quarantined: dict[str, str]) -> StudentReport:
        """Return the rates up to now, with the current teachers; call it about once a second."""
        counts, now = self._counts(), self._clock_s()
        before, self._before = self._before, counts
        is_active = before is None or (counts.batches, counts.waited_s) != (before.batches, before.waited_s)
        resumes = is_active and now - self._active_at > self._pause_s
        if before is None or resumes or counts.connected != before.connected:
            self._since = now  # earlier rates say nothing about the current teachers
            self._meters = {name: RateMeter(now, getattr(counts, name)) for name in _GROWING}
        if is_active:
            self._active_at = now
        idle_s = now - self._active_at
        rates = {}
        for name, meter in self._meters.items():
            meter.mark(getattr(counts, name), now)
            rates[name] = meter.rate(getattr(counts, name), now)
        if is_active and rates["batches"]:
            self._pause_s = MIN_PAUSE_S + PAUSE_BATCHES / rates["batches"]
        return StudentReport(
            waiting=min(1.0, rates["waited_s"]),
            asked=rates["asked_s"],
            samples_per_s=rates["samples"],
            teachers=len(counts.connected),
            want=self._want,
            in_flight=counts.in_flight,
            queued=counts.queued,
            over_s=min(WINDOW_S, now - self._since),
            pauses=self._pause_s < idle_s < LONGEST_PAUSE_S,
            quarantined=quarantined,
        )
