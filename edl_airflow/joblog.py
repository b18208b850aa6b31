"""A job's own log in its task's log: of all instances, each line once, and not too much of it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import msgspec

from edl_airflow.work import Training
from edl_runtime.backends.base import Backend, JobStatus, LogLine
from edl_runtime.errors import BackendError, RegistryUnavailableError
from edl_runtime.progress import is_logged

MOST_LINES = 40
"""So many of the lines that came since the last time are shown, the newest."""

LONGEST_LINE = 2000
"""Letters of a line; the rest of a longer one is left out."""

LAST_WORDS_S = 3.0
"""Seconds that the log of a job that has ended is read for its last lines."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """How much has been shown of the run of the job that was created at this time.

    Of each instance: how many lines, and how many of the times that the cluster has ended it (`disruptions`).
    """

    created_at: float
    lines: dict[int, int] = {}
    disruptions: dict[int, int] = {}


class Logs(Protocol):
    """Where the backend is, and where a position can be kept, so that another process goes on there."""

    @property
    def backend(self) -> Backend: ...

    async def training(self, job: str) -> Training | None:
        """Raises RegistryUnavailableError."""
        ...

    async def log_position(self, job: str) -> Position | None:
        """Raises RegistryUnavailableError."""
        ...

    async def keep_log_position(self, job: str, position: Position) -> None:
        """Raises RegistryUnavailableError."""
        ...


class JobLog:
    """Collects a job's lines as they come, and says them in bunches, at most one every `every_s`.

    A line stands behind its instance, and the rank that this has when it is said: "[2 rank 1] epoch 3". What a student
    logs of its own progress is left out: the task's log has that from Redis. What was shown is kept after each bunch: a
    triggerer that is killed between the two shows one bunch again, and so does one that finds Redis away.
    """

    def __init__(self, job: JobStatus, logs: Logs, say: Callable[[str], None], every_s: float) -> None:
        self._job = job
        self._logs = logs
        self._say = say
        self._every_s = every_s
        self._next_at = 0.0
        self._new: deque[LogLine] = deque(maxlen=MOST_LINES)
        self._arrived = 0
        self._read: Counter[int] = Counter()
        self._shown: Position | None = None
        self._collecting = asyncio.create_task(self._collect())

    async def tell_disruptions(self, job: JobStatus) -> None:
        """Say how often the cluster has ended an instance, each time once. Never raises because Redis is away.

        One that has left by a resize is forgotten: an instance that comes back under its number begins anew.
        """
        before = (await self._shown_before()).disruptions
        for line in new_disruptions(job, before):
            self._say(line)
        now = {instance.index: instance.disruptions for instance in job.instances if instance.disruptions}
        if now != before:
            await self._keep(disruptions=now)

    async def tell(self) -> None:
        """Say what is new, if it is time to. Never raises because Redis is away."""
        if self._arrived and time.monotonic() >= self._next_at:
            await self._tell()

    async def finish(self, *, is_over: bool) -> None:
        """Say what has not been said yet; `is_over`: the job has ended, so that its last lines are there."""
        await asyncio.wait([self._collecting], timeout=LAST_WORDS_S if is_over else 0)
        if self._arrived:
            await self._tell()

    async def close(self) -> None:
        """Stop reading."""
        self._collecting.cancel()
        await asyncio.gather(self._collecting, return_exceptions=True)

    async def _collect(self) -> None:
        try:
            shown = (await self._shown_before()).lines
            async for line in self._logs.backend.logs(self._job.name, follow=True):
                self._read[line.instance] += 1
                is_new = self._read[line.instance] > shown.get(line.instance, 0)
                if is_new and not is_logged(line.text, self._job.name):
                    self._new.append(line)
                    self._arrived += 1
        except BackendError:  # whoever follows the job meets that himself
            return
        except Exception as error:  # noqa: BLE001 -- the training goes on, whatever hides what it writes
            self._say(f"The log of {self._job.name!r} can't be shown any more: {error}")

    async def _shown_before(self) -> Position:
        """Return what has been shown by now, by whomever."""
        if not self._shown:
            position = None
            with suppress(RegistryUnavailableError):
                position = await self._logs.log_position(self._job.name)
            known = position if position and position.created_at == self._job.created_at else None
            self._shown = self._shown or known or Position(created_at=self._job.created_at)
        return self._shown

    async def _keep(self, **changes: dict[int, int]) -> None:
        """Keep what has been shown, for whoever goes on."""
        self._shown = msgspec.structs.replace(await self._shown_before(), **changes)
        with suppress(RegistryUnavailableError):
            await self._logs.keep_log_position(self._job.name, self._shown)

    async def _ranks(self) -> dict[int, int]:
        try:
            training = await self._logs.training(self._job.name)
        except RegistryUnavailableError:
            return {}
        return {instance: rank for rank, instance in enumerate(training.members)} if training else {}

    async def _tell(self) -> None:
        lines, left_out = list(self._new), self._arrived - len(self._new)
        shown = dict(self._read)
        self._new.clear()
        self._arrived = 0
        self._next_at = time.monotonic() + self._every_s
        ranks = await self._ranks()
        if left_out:
            self._say(f"({left_out:,} lines left out; `edl logs {self._job.name}` has them all)")
        for line in lines:
            rank = f" rank {ranks[line.instance]}" if line.instance in ranks else ""
            self._say(f"[{line.instance}{rank}] {_cut(line.text)}")
        await self._keep(lines=shown)


def new_disruptions(job: JobStatus, told: Mapping[int, int]) -> list[str]:
    """Return a line for each time that the cluster has ended an instance, without those `told`, a number of each."""
    most = job.most_disruptions
    lines = []
    for one in job.instances:
        for times in range(told.get(one.index, 0) + 1, one.disruptions + 1):
            of_most = "" if most is None else f" of at most {most}"
            said = f"instance {one.index} was evicted, preempted or lost with its node: {times}{of_most}"
            lines.append(one.reason if one.disrupted and times == one.disruptions else said)
    return [f"{job.name!r}: {line}" for line in lines]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_LINE else f"{text[:LONGEST_LINE]} … ({len(text) - LONGEST_LINE} letters more)"
