"""What a connection's jobs and pools do now: read once for all viewers, and only while somebody looks."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import TypeVar

import msgspec
import structlog
from airflow.sdk.exceptions import AirflowNotFoundException

from edl_airflow.client import EdlClient
from edl_airflow.identity import try_id
from edl_airflow.plugin.airflow_state import TaskKey, tasks_of_tries
from edl_airflow.plugin.clients import Clients
from edl_runtime.autoscale import history
from edl_runtime.autoscale.cluster.snapshot import take_snapshot as take_cluster_snapshot
from edl_runtime.autoscale.history import RescaleOutcome
from edl_runtime.autoscale.outlook import ExpectedPlan, expected_plans
from edl_runtime.backends.interface import JobStatus
from edl_runtime.concurrency import wait_for_event
from edl_runtime.errors import BackendError, EdlError
from edl_runtime.monitor.snapshot import UNKNOWN, JobLine, MonitorSnapshot, PoolLine, take_snapshot
from edl_runtime.store.errors import RegistryError

READ_EVERY_S = 2.0
"""Seconds between two snapshots of few jobs. One that takes longer is followed by a rest of REST times that."""

JOBS_A_SECOND = 100
"""How many jobs are read in a second at most: with more, snapshots are rarer, and pages ask less often."""

REST = 4.0

IDLE_S = 30.0
"""After so many seconds without a viewer nothing is read any more."""

EXPECT_EVERY_S = 60.0
"""How often the plans of the next windows are made."""

AHEAD_S = 24 * 3600.0

Read = TypeVar("Read")

log = structlog.get_logger(__name__)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a connection at a time.

    - `version`: another one for each state, also of other processes.
    - `digest`: of the connection's content; its client is the one to ask for more.
    - `jobs`: of the backend, by name; `lines`: what the one status reader says of them.
    - `tasks`: whose try has started a job, by the job's name, as far as Airflow knows.
    - `done`: the last pass; `expected`: what the policy would decide in the next traffic windows.
    - `problems`: what can't be read now. The rest is then as it was last read.
    """

    version: str
    digest: str = ""
    snapshot: MonitorSnapshot
    jobs: Mapping[str, JobStatus]
    lines: Mapping[str, JobLine]
    tasks: Mapping[str, TaskKey] = {}
    done: RescaleOutcome | None = None
    expected: tuple[ExpectedPlan, ...] = ()
    problems: tuple[str | Exception, ...] = ()


NO_JOBS = Seen(
    version="no jobs",
    snapshot=MonitorSnapshot(at=0.0, submitted=(), pending=(), suspended=(), trainers={}, use={}, jobs=()),
    jobs={},
    lines={},
)
"""Of a task that has started no job, in whatever connection."""


class LiveReader:
    """Reads a connection's state while somebody asks for it. Belongs to one event loop."""

    def __init__(self, conn_id: str, clients: Clients) -> None:
        self._id = uuid.uuid4().hex
        self._conn_id = conn_id
        self._clients = clients
        self._digest = ""
        self._asked_at = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] | None = None
        self._again = asyncio.Event()
        self._last: Seen | None = None
        self._numbers = 0
        self._tries: dict[str, TaskKey] = {}
        self._expected: tuple[float, tuple[ExpectedPlan, ...]] = (0.0, ())
        self._failing: dict[str, str] = {}
        self._logged = ""

    async def seen(self, digest: str) -> Seen:
        """Return the last state; the first caller waits for it, and again once the connection was edited.

        `digest`: of the connection's content, just looked up. Raises BackendError if no state was ever read.
        """
        loop = asyncio.get_running_loop()
        self._asked_at = loop.time()
        if self._reading is None or self._reading.done() or digest != self._digest:
            self.close()
            self._digest, self._first, self._last = digest, loop.create_future(), None
            self._expected, self._failing = (0.0, ()), {}
            self._first.add_done_callback(asyncio.Future.exception)  # so that nobody has to ask for it
            self._reading = loop.create_task(self._read_while_asked(digest, self._first))
        if self._last is None:
            assert self._first  # noqa: S101 - made with the task
            await asyncio.shield(self._first)
        if self._last is None:
            raise _edited()
        return self._last

    def close(self) -> None:
        """Stop reading, and tell those who wait for the first state."""
        if self._reading:
            self._reading.cancel()
        if self._first and not self._first.done():
            self._first.set_exception(_edited())

    def read_now(self) -> None:
        """Read again at once, as after an action."""
        self._again.set()

    async def _read_while_asked(self, digest: str, first: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            while loop.time() < self._asked_at + IDLE_S:
                began = loop.time()
                self._again.clear()
                async with self._clients.open(digest) as client:
                    try:
                        self._last = await self._take(client, digest)
                        self._logged = ""
                    except Exception as error:
                        if self._last is None:
                            raise
                        self._tell(error)
                if not first.done():
                    first.set_result(None)
                rest = max(every_s(len(self._last.jobs)), REST * (loop.time() - began))
                await wait_for_event(self._again, rest)
        except asyncio.CancelledError:
            if not first.done():
                first.set_exception(_edited())
            raise
        except Exception as error:  # noqa: BLE001 - the viewer is told, and the next one tries again
            if first.done():
                self._tell(error)
            else:
                self._log(error)
                first.set_exception(error)

    def _tell(self, error: Exception) -> None:
        """Let viewers know why the state is that of before."""
        if self._last and str(error) not in map(str, self._last.problems):
            self._log(error)
            self._last = msgspec.structs.replace(self._last, version=self._version(), problems=(error,))

    def _log(self, error: Exception) -> None:
        """Log an error of another kind once until all is read again, however often viewers ask."""
        if not isinstance(error, EdlError | AirflowNotFoundException) and str(error) != self._logged:
            log.error("page.not_read", conn_id=self._conn_id, exc_info=error)
            self._logged = str(error)

    async def _take(self, client: EdlClient, digest: str) -> Seen:
        jobs = await client.backend.list()
        snapshot = await take_snapshot(client.backend, client.redis, client.namespace, jobs=jobs)
        if self._last and any(UNKNOWN in lack for lack in snapshot.lacks):
            snapshot = with_last_reports(snapshot, self._last.snapshot)
        known = self._last.done if self._last else None
        last = history.last_pass(client.redis, client.namespace, client.backend.place)
        done = await self._optional("The last pass", last, known)
        tries = {job.name: try_id(job.token) for job in jobs if "/" in job.token}
        await self._optional("Which tasks have started new jobs", self._find_tasks(set(tries.values())), None)
        expected = await self._optional("The next traffic windows", self._plans(client, done), self._expected[1])
        return Seen(
            version=self._version(),
            digest=digest,
            snapshot=snapshot,
            jobs={job.name: job for job in jobs},
            lines={line.name: line for line in (*snapshot.jobs, *snapshot.ended)},
            tasks={name: self._tries.get(each, TaskKey()) for name, each in tries.items()},
            done=done,
            expected=expected,
            problems=(*snapshot.lacks, *self._failing.values()),
        )

    async def _optional(self, what: str, reading: Awaitable[Read], known: Read) -> Read:
        """Return what is read, or what is `known` if that fails: the rest of the page does without."""
        try:
            found = await reading
        except (RegistryError, BackendError):  # as the snapshot says
            return known
        except Exception as error:  # said, and logged once
            if what not in self._failing:
                log.exception("page.not_read", conn_id=self._conn_id, what=what)
            self._failing[what] = f"{what} can't be read now ({type(error).__name__}, see the API server's log)"
            return known
        self._failing.pop(what, None)
        return found

    async def _find_tasks(self, tries: set[str]) -> None:
        """Look up the task instances of tries that are new, and forget those of jobs that are gone."""
        if new := tries - self._tries.keys():
            found = await asyncio.to_thread(tasks_of_tries, new)
            self._tries = {each: found.get(each) or self._tries.get(each) or TaskKey() for each in tries}

    async def _plans(self, client: EdlClient, done: RescaleOutcome | None) -> tuple[ExpectedPlan, ...]:
        """Return the plans of the next windows, by the rules of the last pass; made again each minute."""
        at, plans = self._expected
        now = time.time()
        if done is None or done.rules is None or done.rules.windows is None:
            return ()
        if now < at + EXPECT_EVERY_S and all(plan.at > now for plan in plans):
            return plans
        with suppress(RegistryError, BackendError):
            cluster = await take_cluster_snapshot(client.backend, client.redis, client.namespace)
            plans = tuple(await asyncio.to_thread(expected_plans, cluster, done.rules, until=now + AHEAD_S))
        self._expected = (now, plans)
        return plans

    def _version(self) -> str:
        self._numbers += 1
        return f"{self._id}-{self._numbers}"


def _edited() -> BackendError:
    return BackendError("the connection was edited just now, or is read no more as others are; ask again")


def every_s(jobs: int) -> float:
    """Return the seconds between two snapshots of so many jobs."""
    return max(READ_EVERY_S, jobs / JOBS_A_SECOND)


def with_last_reports(now: MonitorSnapshot, last: MonitorSnapshot) -> MonitorSnapshot:
    """Return a snapshot that was taken without Redis with what Redis said last of the same jobs and pools. Pure."""
    lines = {line.name: line for line in (*last.jobs, *last.ended)}
    pools = {pool.name: pool for pool in last.pools}

    def job(line: JobLine) -> JobLine:
        known = lines.get(line.name)
        return (
            line if known is None else msgspec.structs.replace(line, **{name: getattr(known, name) for name in _TOLD})
        )

    def pool(line: PoolLine) -> PoolLine:
        known = pools.pop(line.name, None)
        if known is None:
            return line
        return msgspec.structs.replace(known, running=line.running, wanted=line.wanted)

    return msgspec.structs.replace(
        now,
        jobs=tuple(map(job, now.jobs)),
        ended=tuple(map(job, now.ended)),
        pools=(*map(pool, now.pools), *(one for one in pools.values() if one.wanted is None)),
        planned_at=last.planned_at,
        window=last.window,
        until=last.until,
        why=last.why,
        notes=last.notes,
    )


_TOLD = ("target", "reason", "progress", "share", "limit", "generation", "checkpoint", "resize")
"""The fields of a line that come from Redis."""
