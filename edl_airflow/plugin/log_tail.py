"""Logs of jobs for the page: one stream of the backend for each run that somebody reads, kept within bounds."""

from __future__ import annotations

import asyncio
import math
import sys
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

import msgspec

from edl_airflow.client import EdlClient
from edl_airflow.plugin.clients import Clients
from edl_airflow.plugin.log_lines import shown_line
from edl_airflow.plugin.runs import AnotherRunError, JobRun, another_run, run_of
from edl_runtime.backends.interface import LogLine

MOST_LINES = 5_000
MOST_BYTES = 4 << 20
"""What is kept of a run's output: the newest of all its instances together."""

MOST_BYTES_OF_ALL = 32 << 20
"""What is kept of all runs together: beyond that, the longest one loses its oldest lines."""

MOST_FOLLOWED = 50
"""Runs that are followed at a time, those that were read first being dropped."""

BYTES_BESIDE = 100
"""Of a line, beside its text."""

IDLE_S = 30.0
"""After so many seconds without a reader the stream is closed, and what was kept is dropped."""

QUIET_S = 0.2
FIRST_LINES_S = 3.0
"""The first reader waits until no line has come for QUIET_S, and no longer than this."""

CHUNK_BYTES = 64 << 10
"""Of a download."""


class LogPart(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a job's log.

    - `cursor`: to ask for what comes next. `reset`: the one that was given does not hold any more, so `lines` replace
      what was read before.
    - `left_out`: how many earlier lines are kept no more, or were not asked for.
    - `ended`: whether the job writes no more.
    """

    lines: list[LogLine]
    cursor: str
    left_out: int
    reset: bool
    ended: bool


class LogBuffer:
    """The newest lines of a run, with their numbers. `bytes`: how much memory they take, about."""

    def __init__(self, most_lines: int = MOST_LINES, most_bytes: int = MOST_BYTES) -> None:
        self.id = uuid.uuid4().hex[:8]
        self._most = (most_lines, most_bytes)
        self._lines: deque[LogLine] = deque()
        self.bytes = 0
        self.added = 0

    def add(self, line: LogLine) -> None:
        """Add the next line, as it is shown."""
        shown = LogLine(line.instance, shown_line(line.text))
        self._lines.append(shown)
        self.bytes += _bytes_of(shown)
        self.added += 1
        while len(self._lines) > self._most[0] or self.bytes > self._most[1]:
            self.drop_oldest()

    def drop_oldest(self) -> int:
        """Drop the oldest line, which has to exist; return how many bytes that frees."""
        freed = _bytes_of(self._lines.popleft())
        self.bytes -= freed
        return freed

    def part(
        self, cursor: str, *, matches: Callable[[LogLine], bool] = lambda _: True, tail: int, ended: bool
    ) -> LogPart:
        """Return the matching lines after a cursor, or without one the last `tail`."""
        first = self.added - len(self._lines)
        buffer, _, number = cursor.partition("-")
        holds = buffer == self.id and number.isdecimal() and first <= int(number) <= self.added
        since = int(number) - first if holds else 0
        found = [line for line in list(self._lines)[since:] if matches(line)]
        lines = found[-tail:]
        return LogPart(
            lines=lines,
            cursor=f"{self.id}-{self.added}",
            left_out=len(found) - len(lines) + (0 if holds else first),
            reset=bool(cursor) and not holds,
            ended=ended,
        )


class LogFollowers:
    """Follows the logs that somebody reads. Belongs to one event loop."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._following: OrderedDict[tuple[str, JobRun], LogFollower] = OrderedDict()

    def __len__(self) -> int:
        return len(self._following)

    def follower(self, digest: str, run: JobRun) -> LogFollower:
        """Return the follower of a run's log, in the connection of this digest. It ends when nobody reads it."""
        key = (digest, run)
        found = self._following.get(key)
        if found is None:

            def dropped(_: object) -> None:
                if self._following.get(key) is found:
                    del self._following[key]

            found = self._following[key] = LogFollower(self._clients, digest, run, self._keep_within_bounds)
            found.task.add_done_callback(dropped)
        self._following.move_to_end(key)
        while len(self._following) > MOST_FOLLOWED:
            self._following.popitem(last=False)[1].close()
        return found

    def _keep_within_bounds(self) -> None:
        buffers = [follower.buffer for follower in self._following.values()]
        surplus = sum(buffer.bytes for buffer in buffers) - MOST_BYTES_OF_ALL
        while surplus > 0:
            longest = max(buffers, key=lambda buffer: buffer.bytes)
            surplus -= longest.drop_oldest()


class LogFollower:
    """Follows a run's log until nobody has read it for IDLE_S; `task` ends with it.

    After a failure the next reader needs another one, whose buffer is another one, so no line is shown twice.
    """

    def __init__(self, clients: Clients, digest: str, run: JobRun, added: Callable[[], None]) -> None:
        self.buffer = LogBuffer()
        self._added = added
        self._idle: asyncio.Timeout | None = None
        self._is_new = True
        self._has_ended = False
        self.task = asyncio.get_running_loop().create_task(self._follow(clients, digest, run))
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody asks for it

    async def read(
        self, cursor: str, *, instance: int | None = None, text: str = "", tail: int = MOST_LINES
    ) -> LogPart:
        """Return what is new since the cursor, of one instance or all, with this text in it, in upper or lower case.

        Raises UnknownJobError; BackendError when the log can't be read.
        """
        if self._idle and not (self._idle.expired() or self.task.done()):
            self._idle.reschedule(asyncio.get_running_loop().time() + IDLE_S)
        if self._is_new:
            self._is_new = False
            await self._wait_for_first_lines()
        if self.task.done() and not self.task.cancelled():
            self.task.result()
        wanted = text.lower()

        def matches(line: LogLine) -> bool:
            return (instance is None or line.instance == instance) and wanted in line.text.lower()

        return self.buffer.part(cursor, matches=matches, tail=tail, ended=self._has_ended)

    def close(self) -> None:
        """Stop following."""
        self.task.cancel()

    async def _follow(self, clients: Clients, digest: str, run: JobRun) -> None:
        try:
            async with asyncio.timeout(IDLE_S) as self._idle:
                with suppress(AnotherRunError):  # the next reader follows that one
                    async with clients.open(digest) as client:
                        async for line in _lines_of(client, run, tail=MOST_LINES, follow=True):
                            self.buffer.add(line)
                            self._added()
                    self._has_ended = True
                    # A removed job's name does not tell its next run from this one
                    await asyncio.sleep(math.inf if run.created_at else IDLE_S)
        except TimeoutError:
            if self._idle is None or not self._idle.expired():
                raise

    async def _wait_for_first_lines(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LINES_S):
                added = -1
                while not (self.task.done() or self._has_ended) and (added != self.buffer.added or not added):
                    added = self.buffer.added
                    await asyncio.wait([self.task], timeout=QUIET_S)


async def whole_log(client: EdlClient, run: JobRun, *, instance: int | None, text: str) -> AsyncGenerator[bytes, None]:
    """Yield all lines of a run's log, each with its instance, as they are shown, in chunks.

    Raises UnknownJobError; BackendError when the log can't be read.
    """
    wanted = text.lower()
    chunk = bytearray()
    async with aclosing(_lines_of(client, run, instance=instance)) as lines:
        async for line in lines:
            shown = shown_line(line.text)
            if wanted in shown.lower():
                chunk += f"[{line.instance}] {shown}\n".encode(errors="replace")
            if len(chunk) >= CHUNK_BYTES:
                yield bytes(chunk)
                chunk.clear()
    yield bytes(chunk)


async def _lines_of(
    client: EdlClient, run: JobRun, *, instance: int | None = None, tail: int | None = None, follow: bool = False
) -> AsyncGenerator[LogLine, None]:
    """Yield the lines of this run, and of no other one of its job's name."""
    is_checked = False
    async with aclosing(client.backend.logs(run.job, instance=instance, tail=tail, follow=follow)) as lines:
        async for line in lines:  # all of one run: that which the backend had when the first one was read
            if not is_checked and await run_of(client, run.job) != run:
                raise another_run(run.job)
            is_checked = True
            yield line


def _bytes_of(line: LogLine) -> int:
    return sys.getsizeof(line.text) + BYTES_BESIDE
