"""Reads and follows instances' logs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from edl_runtime.backends.interface import LogLine

FOLLOW_POLL_S = 0.2
"""How often logs are polled. Unlike inotify, that works on every file system."""

LONGEST_LINE = 1 << 16
"""Bytes. Longer lines are split, so that output without newlines does not fill the memory."""

_BLOCK = 1 << 16


def tail(log: Path, lines: int) -> list[str]:
    """Return the last `lines` lines of `log`; none if the file does not exist."""
    reader = _Reader(log, lines)
    found: list[str] = []
    while (more := reader.read()) is not None:
        found += more
    return (found + reader.rest())[-lines:]


async def follow_run(
    folder: Path, *, instance: int | None = None, last: int | None = None, ended: Callable[[], bool]
) -> AsyncIterator[LogLine]:
    """Yield the lines of all logs in a run's `folder`, or of one `instance`, until `ended()`.

    `last`: begin so many lines before the end of each log that exists already.
    """
    readers: dict[int, _Reader] = {}
    skip = last
    while True:
        stop = await asyncio.to_thread(ended)  # checked before reading, so that no line is missed
        for index, log in await asyncio.to_thread(_logs, folder):
            if instance not in (None, index):
                continue
            if index not in readers:
                readers[index] = await asyncio.to_thread(_Reader, log, skip)
            while (lines := await asyncio.to_thread(readers[index].read)) is not None:
                for line in lines:
                    yield LogLine(index, line)
        if stop:
            break
        skip = None  # logs of later instances are read from their start
        await asyncio.sleep(FOLLOW_POLL_S)
    for index, reader in readers.items():
        for line in reader.rest():
            yield LogLine(index, line)


class _Reader:
    """Reads one log in blocks, from the start or from `last` lines before its end."""

    def __init__(self, log: Path, last: int | None = None) -> None:
        self._log = log
        self._offset = 0
        self._partial = b""
        if last is not None:
            with suppress(FileNotFoundError), log.open("rb") as file:
                self._offset = _start_of_last(file, last)

    def read(self) -> list[str] | None:
        """Return the lines that end in the next block, None at the end of the file."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._offset)
                block = file.read(_BLOCK)
        except FileNotFoundError:  # old runs are pruned
            return None
        if not block:
            return None
        self._offset += len(block)
        *lines, self._partial = (self._partial + block).split(b"\n")
        if len(self._partial) >= LONGEST_LINE:
            lines.append(self._partial)
            self._partial = b""
        return [_text(line) for line in lines]

    def rest(self) -> list[str]:
        """Return the last line if it has no newline."""
        return [_text(self._partial)] if self._partial else []


def _start_of_last(file: BinaryIO, lines: int) -> int:
    """Return the offset of the last `lines` lines, reading backwards."""
    position = file.seek(0, os.SEEK_END)
    if lines == 0 or position == 0:
        return position
    position -= 1  # the last byte may be the newline that ends the last line
    while position > 0:
        length = min(_BLOCK, position)
        position -= length
        file.seek(position)
        block = file.read(length)
        end = len(block)
        while (end := block.rfind(b"\n", 0, end)) >= 0:
            lines -= 1
            if lines == 0:
                return position + end + 1
    return 0


def _logs(folder: Path) -> list[tuple[int, Path]]:
    return sorted((int(log.stem), log) for log in folder.glob("*.log") if log.stem.isdecimal())


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")
