"""Files of the local backend's work folder, and readers of its logs.

| path | what it is |
| --- | --- |
| `jobs/NAME/status.json` | the job's status, as its supervisor last wrote it |
| `jobs/NAME/supervisor.lock` | held, with its process id in it, while the supervisor lives |
| `jobs/NAME/processes.lock` | held while any process of the job lives |
| `jobs/NAME/address` | the path of the supervisor's socket: `jobs/NAME/socket`, or a shorter one in `/tmp` |
| `jobs/NAME/results/INDEX.json` | an instance's result, see `write_result` |
| `locks/NAME` | held while the job is started or stopped |
| `runs/NAME/RUN/INDEX.log` | an instance's output |
| `runs/NAME/RUN/owner` | the owner of the run, see `token_owner` |
| `runs/NAME/RUN/work/INDEX/` | an instance's working directory, unless its spec names one |
| `runs/NAME/RUN/supervisor.log` | the supervisor's own log |

Runs outlive their job, see `prune_runs`. Folders in `jobs` that start with a dot are being made or removed. All is
readable by its owner only.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from edl_runtime import locks
from edl_runtime.backends.interface import JobStatus, LogLine, token_owner
from edl_runtime.errors import DamagedFileError
from edl_runtime.files import open_regular, read_regular
from edl_runtime.parsing import JsonDecoder
from edl_runtime.result import RESULT_LIMIT

NO_SPACE = os.strerror(errno.ENOSPC)

FULL_BELOW_BYTES = 1 << 20
"""Bytes. A disk with less free space counts as full."""


def full_folders(folders: Iterable[Path]) -> list[str]:
    """Return which of these folders are on a full disk."""
    found = []
    for folder in folders:
        with suppress(OSError):  # it does not exist
            if shutil.disk_usage(folder).free < FULL_BELOW_BYTES:
                found.append(str(folder))
    return list(dict.fromkeys(found))


def name_full_folder(reason: str, folder: Path) -> str:
    """Return the reason of a failure, with the folder's path if its disk is full and the reason does not name it."""
    return f"{reason}: {folder}" if NO_SPACE in reason and str(folder) not in reason else reason


def full_disk(folder: Path) -> str:
    """Return that the disk of this folder is full, empty if it is not."""
    return f"the disk of {folder} is full" if full_folders([folder]) else ""


_SUPERVISOR_DIED = (
    "its supervisor died (killed, out of memory, or without room on its disk), and its instances with it; another try, "
    "or submitting it again, restarts it"
)


class JobFolder:
    """Files of one job while it exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.status_file = path / "status.json"
        self.supervisor_lock = path / "supervisor.lock"
        self.processes_lock = path / "processes.lock"
        self.address_file = path / "address"

    def read_status(self) -> JobStatus | None:
        """Return the job's status, None if there is no such job. A job whose supervisor died has failed.

        A full disk is its reason, because the supervisor can't write there.
        """
        status = self._read_status()
        if status and not status.has_ended and not locks.is_held(self.supervisor_lock):
            status = self._read_status()  # it may have ended properly meanwhile
            if status and not status.has_ended:
                status = _failed_by_dead_supervisor(status, full_disk(self.path))
        elif status and not status.has_ended and not status.reason and (full := full_disk(self.path)):
            status = msgspec.structs.replace(status, reason=f"{full}, so this may be out of date")
        return status and msgspec.structs.replace(status, result=self._read_result())

    def write_status(self, status: JobStatus) -> None:
        """Replace the status atomically."""
        write_atomically(self.status_file, msgspec.json.encode(status))

    def result_file(self, index: int) -> Path:
        return self.path / "results" / f"{index}.json"

    def remove(self) -> None:
        """Remove the folder and the socket. A job of the same name may be created meanwhile."""
        with suppress(OSError, DamagedFileError):
            socket = self.address()
            if socket.parent != self.path:
                socket.unlink(missing_ok=True)
                socket.parent.rmdir()
        rubbish = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")  # not made: the disk may be full
        with suppress(FileNotFoundError):
            self.path.rename(rubbish)
        shutil.rmtree(rubbish, ignore_errors=True)

    def address(self) -> Path:
        """Return the path of the supervisor's socket. Raises FileNotFoundError without a job, DamagedFileError."""
        return Path(os.fsdecode(read_regular(self.address_file)))

    def kill_supervisor(self) -> None:
        """Kill the supervisor, and so all of its instances."""
        with suppress(FileNotFoundError, ProcessLookupError):
            pid = int(read_regular(self.supervisor_lock))
            if locks.is_held(self.supervisor_lock):
                os.kill(pid, signal.SIGKILL)

    def _read_status(self) -> JobStatus | None:
        try:
            return JsonDecoder(JobStatus).decode(read_regular(self.status_file))
        except (FileNotFoundError, DamagedFileError, msgspec.DecodeError):  # by a crash of the machine: nothing runs
            return None

    def _read_result(self) -> dict[str, Any] | None:
        """Return the newest: rank 0 of an elastic training changes, and each one that leaves writes a result."""
        for file in sorted((self.path / "results").glob("*.json"), key=_changed_at, reverse=True):
            with suppress(FileNotFoundError, DamagedFileError, msgspec.DecodeError):
                return JsonDecoder(dict[str, Any]).decode(read_regular(file, RESULT_LIMIT))
        return None


class WorkFolder:
    """The local backend's work folder: all jobs and their logs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Make the folders that do not exist. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        for part in ("jobs", "locks", "runs"):
            (self.path / part).mkdir(exist_ok=True, mode=0o700)

    def job(self, name: str) -> JobFolder:
        return JobFolder(self.path / "jobs" / name)

    def jobs(self) -> list[str]:
        return _visible_names(self.path / "jobs")

    def new_job(self, name: str) -> JobFolder:
        """Make a hidden folder for a new job, and remove those of failed starts. Needs the job's lock."""
        for rubbish in (self.path / "jobs").glob(f".{name}.*"):
            shutil.rmtree(rubbish, ignore_errors=True)
        return JobFolder(Path(tempfile.mkdtemp(prefix=f".{name}.", dir=self.path / "jobs")))

    def lock(self, name: str) -> Path:
        return self.path / "locks" / name

    def run_folder(self, status: JobStatus) -> Path:
        started = datetime.fromtimestamp(status.created_at, UTC)
        return self.path / "runs" / status.name / f"{started:%Y%m%dT%H%M%S.%fZ}-{status.digest[:8]}"

    def runs(self, name: str) -> list[Path]:
        """Return the folders of the runs that are kept, oldest first."""
        folder = self.path / "runs" / name
        return [folder / run for run in _visible_names(folder)]

    def logged(self) -> list[str]:
        """Return the names of all jobs with runs."""
        return _visible_names(self.path / "runs")

    def new_run(self, status: JobStatus) -> None:
        self.run_folder(status).mkdir(parents=True, mode=0o700)
        self.keep_owner(status)

    def keep_owner(self, status: JobStatus) -> None:
        """Record the owner of the job's run. Like the logs, it outlives the job."""
        with suppress(FileNotFoundError):  # the run was pruned
            write_atomically(self.run_folder(status) / "owner", token_owner(status.token).encode())

    def owner(self, run: Path) -> str:
        """Return the owner of the run, empty for none."""
        with suppress(FileNotFoundError):
            return read_regular(run / "owner").decode()
        return ""


def write_atomically(file: Path, content: bytes) -> None:
    """Replace the content of `file`: readers see the old or the new one."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_bytes(content)
    partial.replace(file)


def _visible_names(folder: Path) -> list[str]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    return []


def _changed_at(file: Path) -> int:
    with suppress(FileNotFoundError):
        return file.stat().st_mtime_ns
    return 0


def _failed_by_dead_supervisor(status: JobStatus, full: str) -> JobStatus:
    reason = f"{full}, so how it ended could not be written; make room, and submit it again"
    killed = {"phase": "failed", "exit_code": -signal.SIGKILL}
    instances = tuple(
        msgspec.structs.replace(one, **killed) if one.phase == "running" else one for one in status.instances
    )
    return msgspec.structs.replace(
        status, phase="failed", scaling=None, reason=reason if full else _SUPERVISOR_DIED, instances=instances
    )


MAX_RUNS_OF_JOB = 5
"""How many runs of one job are kept."""

MAX_RUNS_OF_REMOVED_JOBS = 200
"""How many runs of all jobs that were deleted are kept."""


def prune_runs(work: WorkFolder, name: str) -> None:
    """Remove runs beyond these limits: of the job `name`, whose supervisor calls this, and of deleted jobs.

    Removes unused locks, too. Jobs that are being started or stopped keep theirs.
    """
    for run in work.runs(name)[:-MAX_RUNS_OF_JOB]:
        shutil.rmtree(run, ignore_errors=True)
    locked = set(_visible_names(work.path / "locks"))
    gone = {*locked, *work.logged()}.difference(work.jobs())
    runs = sorted((run for gone_name in gone for run in work.runs(gone_name)), key=lambda run: run.name)
    surplus = runs[:-MAX_RUNS_OF_REMOVED_JOBS]
    for gone_name in gone & (locked | {run.parent.name for run in surplus}):
        _remove_old_runs(work, gone_name, surplus)


def _remove_old_runs(work: WorkFolder, name: str, surplus: Collection[Path]) -> None:
    """Remove the surplus runs of a deleted job, and its lock, unless a job of that name is being started."""
    lock = work.lock(name)
    descriptor = locks.take(lock)
    if descriptor is None:
        return
    try:
        if work.job(name).path.exists():
            return
        for run in work.runs(name):
            if run in surplus:
                shutil.rmtree(run, ignore_errors=True)
        with suppress(OSError):
            (work.path / "runs" / name).rmdir()  # fails if runs are left
        lock.unlink()
    finally:
        os.close(descriptor)


FOLLOW_POLL_S = 0.2
"""How often logs are polled. Unlike inotify, that works on every file system."""

LONGEST_LINE = 1 << 16
"""Bytes. Longer lines are split, so that output without newlines does not fill the memory."""

_BLOCK = 1 << 16


LAST_LINES = 30
"""How many lines of a failed process's log its error has."""


def tail(log: Path, lines: int = LAST_LINES) -> list[str]:
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
            with suppress(FileNotFoundError, DamagedFileError), open_regular(log) as file:
                self._offset = _start_of_last(file, last)

    def read(self) -> list[str] | None:
        """Return the lines that end in the next block, None at the end of the file."""
        try:
            with open_regular(self._log) as file:
                file.seek(self._offset)
                block = file.read(_BLOCK)
        except (FileNotFoundError, DamagedFileError):  # old runs are pruned
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
