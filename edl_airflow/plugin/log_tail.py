"""Logs of jobs for the page: one stream of the backend for each job that somebody reads, kept within bounds."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress

import msgspec

from edl_airflow.client import EdlClient, open_client
from edl_airflow.hooks.edl import EdlHook
from edl_airflow.plugin.log_lines import shown_line
from edl_runtime.backends.interface import LogLine

MOST_LINES = 5_000
MOST_CHARACTERS = 2_000_000
"""What is kept of a job's output: the newest of all its instances together."""

IDLE_S = 30.0
"""After so many seconds without a reader the stream is closed."""

QUIET_S = 0.2
FIRST_LINES_S = 3.0
"""The first reader waits until no line has come for QUIET_S, and no longer than this."""


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
    """The newest lines of a job, with their numbers."""

    def __init__(self, most_lines: int = MOST_LINES, most_characters: int = MOST_CHARACTERS) -> None:
        self.id = uuid.uuid4().hex[:8]
        self._most = (most_lines, most_characters)
        self._lines: deque[LogLine] = deque()
        self._characters = 0
        self.added = 0

    def add(self, line: LogLine) -> None:
        """Add the next line, as it is shown."""
        shown = LogLine(line.instance, shown_line(line.text))
        self._lines.append(shown)
        self._characters += len(shown.text)
        self.added += 1
        while len(self._lines) > self._most[0] or self._characters > self._most[1]:
            self._characters -= len(self._lines.popleft().text)

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


class LogFollower:
    """Follows a job's log while somebody reads it. Belongs to one event loop."""

    def __init__(self, conn_id: str, job: str) -> None:
        self._conn_id = conn_id
        self._job = job
        self._buffer = LogBuffer()
        self._following: asyncio.Task[None] | None = None
        self._read_at = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nobody has read it lately, so that it can be dropped."""
        return asyncio.get_running_loop().time() > self._read_at + IDLE_S

    async def read(
        self, cursor: str, *, instance: int | None = None, text: str = "", tail: int = MOST_LINES
    ) -> LogPart:
        """Return what is new since the cursor, of one instance or all, with this text in it, in upper or lower case.

        Raises UnknownJobError; BackendError when the log can't be read.
        """
        loop = asyncio.get_running_loop()
        self._read_at = loop.time()
        if self._following is None:
            self._following = loop.create_task(self._follow())
            await self._wait_for_first_lines()
        ended = self._following.done()
        if ended and not self._following.cancelled() and (error := self._following.exception()):
            self._following = None
            raise error
        wanted = text.lower()

        def matches(line: LogLine) -> bool:
            return (instance is None or line.instance == instance) and wanted in line.text.lower()

        return self._buffer.part(cursor, matches=matches, tail=tail, ended=ended)

    def close(self) -> None:
        """Stop following."""
        if self._following:
            self._following.cancel()

    async def _follow(self) -> None:
        async with (
            open_client(await EdlHook(self._conn_id).aedl_connection()) as client,
            aclosing(client.backend.logs(self._job, tail=MOST_LINES, follow=True)) as lines,
        ):
            async for line in lines:
                self._buffer.add(line)

    async def _wait_for_first_lines(self) -> None:
        assert self._following  # noqa: S101 - just made
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LINES_S):
                added = -1
                while not self._following.done() and (added != self._buffer.added or not added):
                    added = self._buffer.added
                    await asyncio.wait([self._following], timeout=QUIET_S)


async def whole_log(client: EdlClient, job: str, *, instance: int | None, text: str) -> AsyncIterator[bytes]:
    """Yield all lines of a job's log, each with its instance, as they are shown. Raises UnknownJobError."""
    wanted = text.lower()
    async with aclosing(client.backend.logs(job, instance=instance)) as lines:
        async for line in lines:
            shown = shown_line(line.text)
            if wanted in shown.lower():
                yield f"[{line.instance}] {shown}\n".encode(errors="replace")
