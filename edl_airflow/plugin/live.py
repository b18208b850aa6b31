"""What a connection's jobs and pools do now: read once for all viewers, and only while somebody looks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from edl_airflow.client import EdlClient, open_client
from edl_airflow.hooks.edl import EdlHook
from edl_airflow.plugin.airflow_state import TaskKey, tasks_of_tries
from edl_runtime.autoscale import history
from edl_runtime.autoscale.cluster.snapshot import take_snapshot as take_cluster_snapshot
from edl_runtime.autoscale.history import RescaleOutcome
from edl_runtime.autoscale.outlook import ExpectedPlan, expected_plans
from edl_runtime.backends.interface import JobStatus
from edl_runtime.errors import BackendError
from edl_runtime.monitor.snapshot import UNKNOWN, JobLine, MonitorSnapshot, PoolLine, take_snapshot
from edl_runtime.store.errors import RegistryError

READ_EVERY_S = 2.0
"""Seconds between two snapshots of few jobs. One that takes longer is followed by a rest of REST times that."""

JOBS_A_SECOND = 100
"""How many jobs are read in a second at most: with more, snapshots are rarer, and pages ask less often."""

REST = 4.0

IDLE_S = 30.0
"""After so many seconds without a viewer nothing is read any more."""

REOPEN_S = 600.0
"""How long a client is used: a user may have edited the connection."""

EXPECT_EVERY_S = 60.0
"""How often the plans of the next windows are made."""

AHEAD_S = 24 * 3600.0


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a connection at a time.

    - `version`: another one for each state, also of other processes.
    - `jobs`: of the backend, by name; `lines`: what the one status reader says of them.
    - `tasks`: whose try has started a job, by the job's name, as far as Airflow knows.
    - `done`: the last pass; `expected`: what the policy would decide in the next traffic windows.
    - `problems`: what can't be read now. The rest is then as it was last read.
    """

    version: str
    snapshot: MonitorSnapshot
    jobs: Mapping[str, JobStatus]
    lines: Mapping[str, JobLine]
    tasks: Mapping[str, TaskKey] = {}
    done: RescaleOutcome | None = None
    expected: tuple[ExpectedPlan, ...] = ()
    problems: tuple[str, ...] = ()


NO_JOBS = Seen(
    version="no jobs",
    snapshot=MonitorSnapshot(at=0.0, submitted=(), pending=(), suspended=(), trainers={}, use={}, jobs=()),
    jobs={},
    lines={},
)
"""Of a task that has started no job, in whatever connection."""


class LiveReader:
    """Reads a connection's state while somebody asks for it. Belongs to one event loop."""

    def __init__(self, conn_id: str) -> None:
        self._conn_id = conn_id
        self._asked_at = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] | None = None
        self._again = asyncio.Event()
        self._last: Seen | None = None
        self._numbers = 0
        self._tries: dict[str, TaskKey] = {}
        self._expected: tuple[float, tuple[ExpectedPlan, ...]] = (0.0, ())

    async def seen(self) -> Seen:
        """Return the last state; the first caller waits for it.

        Raises SpecError, AirflowNotFoundException for the connection; BackendError if no state was ever read.
        """
        loop = asyncio.get_running_loop()
        self._asked_at = loop.time()
        if self._reading is None or self._reading.done():
            self._first, self._last = loop.create_future(), None
            self._first.add_done_callback(asyncio.Future.exception)  # so that nobody has to ask for it
            self._reading = loop.create_task(self._read_while_asked(self._first))
        if self._last is None:
            assert self._first  # noqa: S101 - made with the task
            await asyncio.shield(self._first)
        assert self._last  # noqa: S101 - else the future has raised
        return self._last

    def read_now(self) -> None:
        """Read again at once, as after an action."""
        self._again.set()

    async def _read_while_asked(self, first: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            while loop.time() < self._asked_at + IDLE_S:
                async with open_client(await EdlHook(self._conn_id).aedl_connection()) as client:
                    await self._read(client, first, until=loop.time() + REOPEN_S)
        except asyncio.CancelledError:
            first.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - the viewer is told, and the next one tries again
            self._fail(error, first)

    async def _read(self, client: EdlClient, first: asyncio.Future[None], *, until: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < min(until, self._asked_at + IDLE_S):
            began = loop.time()
            self._again.clear()
            try:
                self._last = await self._take(client)
            except BackendError as error:
                if self._last is None:
                    raise
                self._fail(error, first)
            if not first.done():
                first.set_result(None)
            rest = max(every_s(len(self._last.jobs)), REST * (loop.time() - began))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._again.wait(), rest)

    def _fail(self, error: Exception, first: asyncio.Future[None]) -> None:
        if not first.done():
            first.set_exception(error)
        elif self._last and str(error) not in self._last.problems:
            self._last = msgspec.structs.replace(self._last, version=self._version(), problems=(str(error),))

    async def _take(self, client: EdlClient) -> Seen:
        jobs = await client.backend.list()
        snapshot = await take_snapshot(client.backend, client.redis, client.namespace, jobs=jobs)
        done = self._last.done if self._last else None
        with suppress(RegistryError):
            done = await history.last_pass(client.redis, client.namespace)
        if self._last and any(UNKNOWN in lack for lack in snapshot.lacks):
            snapshot = with_last_reports(snapshot, self._last.snapshot)
        return Seen(
            version=self._version(),
            snapshot=snapshot,
            jobs={job.name: job for job in jobs},
            lines={line.name: line for line in (*snapshot.jobs, *snapshot.ended)},
            tasks=await self._tasks(jobs),
            done=done,
            expected=await self._plans(client, done),
            problems=snapshot.lacks,
        )

    async def _tasks(self, jobs: list[JobStatus]) -> dict[str, TaskKey]:
        tries = {job.name: job.token.rpartition("/")[2] for job in jobs if "/" in job.token}
        if new := set(tries.values()) - self._tries.keys():
            found = await asyncio.to_thread(tasks_of_tries, new)
            self._tries = {each: found.get(each) or self._tries.get(each) or TaskKey() for each in tries.values()}
        return {name: self._tries[each] for name, each in tries.items()}

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
        return f"{id(self):x}-{self._numbers}"


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
