"""Writes a job's output and its progress to the task's log."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import msgspec

from edl_airflow.runtime.decisions import TaskState, missing_teachers
from edl_airflow.runtime.spec import LogPosition, TaskSpec
from edl_runtime.backends.errors import ClusterUnavailableError, UnknownJobError
from edl_runtime.backends.interface import JobStatus, LogLine
from edl_runtime.progress import Progress, is_progress_line, progress_of_run
from edl_runtime.store.errors import RegistryError, RegistryUnavailableError

if TYPE_CHECKING:
    from edl_airflow.client import EdlClient

LogFunction = Callable[[str], None]

MAX_NAMED = 3
"""How many teachers one line names; it counts the others."""

MAX_LINES = 40
"""How many of the new lines are logged at a time; the newest."""

MAX_LINE_CHARS = 2000
"""Characters of a line; the rest is left out."""

FINAL_LINES_WAIT_S = 3.0
"""Seconds to wait for the last lines of a job that has ended."""


class JobLogRelay:
    """Copies a job's output to the task's log, in batches, at most one every `every_s`.

    That is the output of the instance that is rank 0, for a triggerer follows hundreds of jobs and each log is a
    connection; of all instances with `all_logs`, and once one of them has failed or was ended by the cluster. Of a job
    that is not elastic, or whose first generation has yet to form, instance 0 counts as rank 0. Every `every_s` it asks
    Redis who that is, so one that was rank 0 for less may not be shown.

    A line begins with its instance and the instance's current rank: "[2 rank 1] epoch 3". A student's lines of progress
    are left out, as the task's log has its progress from Redis. The position is saved after each batch, so a triggerer
    that is killed between the two, or that can't reach Redis, may repeat a batch.
    """

    def __init__(
        self, job: JobStatus, client: EdlClient, log: LogFunction, every_s: float, *, all_logs: bool = False
    ) -> None:
        self._job = job
        self._client = client
        self._log_line = log
        self._every_s = every_s
        self._next_at = 0.0
        self._new: deque[LogLine] = deque(maxlen=MAX_LINES)
        self._arrived = 0
        self._read: Counter[str] = Counter()
        self._shown: LogPosition | None = None
        self._all_logs = all_logs
        self._wanted: int | None = None
        self._reading: int | None = None
        self._ask_at = 0.0
        self._collecting: asyncio.Task[None] | None = None

    async def look(self, job: JobStatus) -> None:
        """Read the output of rank 0 from now on, of all instances if one has failed; log each disruption once."""
        self._all_logs = self._all_logs or has_failures(job)
        wanted = None if self._all_logs else await self._first_rank(job)
        if self._collecting is None or wanted != self._wanted:
            await self.close()
            if self._arrived:
                await self._flush()
            self._wanted = wanted
            self._read.clear()
            self._collecting = asyncio.create_task(self._collect())
        await self.log_disruptions(job)

    async def log_disruptions(self, job: JobStatus) -> None:
        """Log each disruption of an instance once. Never raises because Redis is away.

        Instances that a resize has removed are forgotten: a later one with the same number starts at 0.
        """
        before = (await self._position()).disruptions
        for line in new_disruptions(job, before):
            self._log_line(line)
        now = {instance.index: instance.disruptions for instance in job.instances if instance.disruptions}
        if now != before:
            await self._keep(disruptions=now)

    async def flush_when_due(self) -> None:
        """Log new lines, if a batch is due. Never raises because Redis is away."""
        if self._arrived and time.monotonic() >= self._next_at:
            await self._flush()

    async def finish(self, *, is_over: bool) -> None:
        """Log the remaining lines. `is_over`: the job has ended, so its last lines are about to come."""
        if self._collecting:
            await asyncio.wait([self._collecting], timeout=FINAL_LINES_WAIT_S if is_over else 0)
        if self._arrived:
            await self._flush()

    async def close(self) -> None:
        """Stop reading."""
        if self._collecting:
            self._collecting.cancel()
            await asyncio.gather(self._collecting, return_exceptions=True)

    async def _first_rank(self, job: JobStatus) -> int:
        """Return the instance that is rank 0, or was while Redis is away or no generation is active."""
        if job.elastic and (job.has_ended or time.monotonic() >= self._ask_at):
            self._ask_at = time.monotonic() + self._every_s
            if ranks := await self._ranks():
                return next(iter(ranks))
        return (await self._position()).instance if self._wanted is None else self._wanted

    async def _collect(self) -> None:
        """Read the wanted output; before that, what the one that was rank 0 until now has written meanwhile."""
        try:
            before = (await self._position()).instance if self._reading is None else self._reading
            if self._wanted not in (None, before):
                await self._read_lines(before, follow=False)
            self._reading = self._wanted
            await self._read_lines(self._wanted, follow=True)
        except (UnknownJobError, ClusterUnavailableError):  # the runner meets it, too, and handles it
            return
        except Exception as error:  # noqa: BLE001 (the training continues without its log)
            self._log_line(f"The log of {self._job.name!r} can't be shown any more: {error}")

    async def _read_lines(self, instance: int | None, *, follow: bool) -> None:
        shown = (await self._position()).lines
        async for line in self._client.backend.logs(self._job.name, instance=instance, follow=follow):
            self._read[_source(line)] += 1
            is_new = self._read[_source(line)] > shown.get(_source(line), 0)
            if is_new and not is_progress_line(line.text, self._job.name):
                self._new.append(line)
                self._arrived += 1

    async def _position(self) -> LogPosition:
        """Return what was logged by now, by this process or an earlier one."""
        if not self._shown:
            position = None
            with suppress(RegistryUnavailableError):
                position = await self._client.log_position(self._job.name)
            known = position if position and position.created_at == self._job.created_at else None
            # Another coroutine may have set it during the await
            self._shown = self._shown or known or LogPosition(created_at=self._job.created_at)
        return self._shown

    async def _keep(self, **changes: Any) -> None:
        self._shown = msgspec.structs.replace(await self._position(), **changes)
        with suppress(RegistryUnavailableError):
            await self._client.save_log_position(self._job.name, self._shown)

    async def _ranks(self) -> dict[int, int]:
        """Return the ranks by instance, that of rank 0 first; none of an earlier run of the job."""
        training = None
        with suppress(RegistryError):
            training = await self._client.training(self._job.name)
        if not training or training.heard_at < self._job.created_at:
            return {}
        return {instance: rank for rank, instance in enumerate(training.members)}

    async def _flush(self) -> None:
        lines, left_out = list(self._new), self._arrived - len(self._new)
        shown, reading = dict(self._read), self._reading
        self._new.clear()
        self._arrived = 0
        self._next_at = time.monotonic() + self._every_s
        ranks = await self._ranks()
        if left_out:
            self._log_line(f"({left_out:,} lines left out; `edl logs {self._job.name}` has them all)")
        for line in lines:
            rank = f" rank {ranks[line.instance]}" if line.instance in ranks else ""
            self._log_line(f"[{line.instance}{rank}] {_cut(line.text)}")
        position = await self._position()
        before = position.lines  # of what is read again there may be more
        lines_shown = {**before, **{one: max(count, before.get(one, 0)) for one, count in shown.items()}}
        await self._keep(lines=lines_shown, instance=position.instance if reading is None else reading)


def has_failures(job: JobStatus) -> bool:
    """Whether an instance has failed, or was ended by the cluster, so that its output may say why."""
    return job.phase == "failed" or any(
        one.phase == "failed" or one.restarts or one.disruptions for one in job.instances
    )


def new_disruptions(job: JobStatus, logged: Mapping[int, int]) -> list[str]:
    """Return a line for each disruption of an instance, beyond the `logged` number of each instance."""
    most = job.most_disruptions
    lines = []
    for one in job.instances:
        for times in range(logged.get(one.index, 0) + 1, one.disruptions + 1):
            of_most = "" if most is None else f" of at most {most}"
            line = f"instance {one.index} was evicted, preempted or lost with its node: {times}{of_most}"
            lines.append(one.reason if one.disrupted and times == one.disruptions else line)
    return [f"{job.name!r}: {line}" for line in lines]


def _source(line: LogLine) -> str:
    """Return whose lines are counted together: another pod of an instance begins a log of its own."""
    return line.pod or str(line.instance)


def _cut(text: str) -> str:
    return (
        text
        if len(text) <= MAX_LINE_CHARS
        else f"{text[:MAX_LINE_CHARS]} … ({len(text) - MAX_LINE_CHARS} letters more)"
    )


class ProgressLogger:
    """Logs the work's progress and the job's output: only what is new, at most every `progress_every_s`.

    A changed bottleneck is logged at once, and each teacher in quarantine once; lines of progress have their number.
    A context manager, which reads the job's log meanwhile.
    """

    def __init__(
        self,
        spec: TaskSpec,
        client: EdlClient,
        log: LogFunction,
        show: Callable[[Progress], None] | None = None,
    ) -> None:
        self._spec = spec
        self._show = show
        self._client = client
        self._log_line = log
        self._log: JobLogRelay | None = None
        self._logged: dict[str, str] = {}
        self._limit = ""
        self._quarantined: set[str] = set()
        self._lost_teachers: set[str] = set()
        self._next_at = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._log:
            await self._log.close()

    async def update(self, view: TaskState) -> None:
        """Log what is new. Never raises because Redis is away."""
        if view.pool:
            self._log_pool(view.pool)
        if not view.trainer:
            self._log_if_new(
                "teachers", f"Waiting for teachers of pool {self._spec.pool!r}: {missing_teachers(self._spec, view)}"
            )
            return
        await self._log_of(view.trainer).look(view.trainer)
        if not view.trainer.has_ended:
            self._log_reason("trainer", f"{view.trainer.name!r}", view.trainer)
        await self._log_of(view.trainer).flush_when_due()
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + self._spec.progress_every_s
            await self._log_progress(view.trainer)

    async def finish(self, view: TaskState, *, is_over: bool) -> None:
        """Log the job's last lines and progress, unless a later try has adopted it. `is_over`: it writes no more."""
        if view.trainer and view.trainer.token == self._spec.token:
            await self._log_of(view.trainer).look(view.trainer)
            await self._log_of(view.trainer).finish(is_over=is_over)
            with suppress(RegistryUnavailableError):
                self._log_report(await latest_progress(view.trainer, self._client))

    def _log_of(self, job: JobStatus) -> JobLogRelay:
        self._log = self._log or JobLogRelay(
            job, self._client, self._log_line, self._spec.progress_every_s, all_logs=self._spec.all_logs
        )
        return self._log

    def _log_pool(self, pool: JobStatus) -> None:
        """Log each teacher that the cluster has ended once, and their total number; of many new ones, the last few."""
        ended = {**pool.replaced, **{one.pod: one.reason for one in pool.instances if one.disrupted}}
        new = [pod for pod in ended if pod not in self._lost_teachers]
        counted = enumerate(new, start=len(self._lost_teachers) + 1)
        self._lost_teachers.update(new)
        for count, pod in list(counted)[-MAX_NAMED:]:
            self._log_line(f"Pool {pool.name!r}: {ended[pod]}: {count} by now")
        self._log_reason("pool", f"Pool {pool.name!r}", pool)

    async def _log_progress(self, job: JobStatus) -> None:
        try:
            progress = await latest_progress(job, self._client)
        except RegistryUnavailableError as error:
            self._log_if_new("progress", f"{error}. The training continues, without progress shown here")
            return
        self._log_report(progress)

    def _log_report(self, progress: Progress | None) -> None:
        if progress:
            if self._show:
                self._show(progress)
            self._log_if_new("progress", progress.line())
            self._log_troubles(progress)

    def _log_reason(self, matter: str, who: str, job: JobStatus) -> None:
        """Log a job's trouble once, and again if it comes back."""
        if not job.reason:
            self._logged.pop(matter, None)
        elif not _is_disruption(job):
            self._log_if_new(matter, f"{who}: {job.reason}")

    def _log_troubles(self, progress: Progress) -> None:
        verdict = progress.verdict()
        if verdict and progress.limit != self._limit:
            self._limit = progress.limit
            self._log_line(f"step {progress.step} · {verdict}")
        unnamed = {who: why for who, why in progress.quarantined.items() if who not in self._quarantined}
        if unnamed:
            self._quarantined |= unnamed.keys()
            self._log_line(f"step {progress.step} · in quarantine: {_named(unnamed)}")

    def _log_if_new(self, matter: str, line: str) -> None:
        if self._logged.get(matter) != line:
            self._logged[matter] = line
            self._log_line(line)


def _is_disruption(job: JobStatus) -> bool:
    """Whether the job's reason is a disruption, which is logged separately."""
    return any(one.disrupted and one.reason == job.reason for one in job.instances)


def _named(quarantined: Mapping[str, str]) -> str:
    """Return teachers with their reasons; a reason may begin with the teacher's name, which is cut."""
    named = [f"{who} ({why.removeprefix(f'{who}: ')})" for who, why in sorted(quarantined.items())[:MAX_NAMED]]
    more = len(quarantined) - len(named)
    return "; ".join([*named, f"and {more} more"] if more else named)


async def latest_progress(job: JobStatus, client: EdlClient) -> Progress | None:
    """Return the last report of this run of the job; Redis may still have an earlier run's."""
    return progress_of_run(await client.progress(job.name), job.created_at)
