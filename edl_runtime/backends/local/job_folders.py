"""Where the local backend keeps what, below its work folder.

| path | what it is |
| --- | --- |
| `jobs/NAME/status.json` | the job's status, as its supervisor last wrote it |
| `jobs/NAME/supervisor.lock` | held, with its process id in it, while the supervisor lives |
| `jobs/NAME/processes.lock` | held while any process of the job lives |
| `jobs/NAME/address` | the path of the supervisor's socket: `jobs/NAME/socket`, or a shorter one elsewhere |
| `jobs/NAME/results/INDEX.json` | what an instance left by `write_result` |
| `locks/NAME` | held while the job is started or stopped |
| `runs/NAME/RUN/INDEX.log` | what an instance wrote |
| `runs/NAME/RUN/owner` | whose the run is, see `token_owner`; empty for nobody's |
| `runs/NAME/RUN/work/INDEX/` | the folder that an instance starts in, unless its spec names one |
| `runs/NAME/RUN/supervisor.log` | what the supervisor did |

Runs outlive their job; see `prune_runs` for how long. Folders below `jobs` that start with a dot are being made or
removed. All is readable by its owner only.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from edl_runtime import locks
from edl_runtime.backends.interface import InstanceStatus, JobStatus, token_owner
from edl_runtime.parsing import JsonDecoder
from edl_runtime.result import RESULT_LIMIT

NO_SPACE = os.strerror(errno.ENOSPC)

FULL_BELOW_BYTES = 1 << 20
"""Bytes: a disk that has less is full."""


def full_folders(folders: Iterable[Path]) -> list[str]:
    """Return which of these folders lie on a full disk, each once."""
    found = []
    for folder in folders:
        with suppress(OSError):  # it is not there
            if shutil.disk_usage(folder).free < FULL_BELOW_BYTES:
                found.append(str(folder))
    return list(dict.fromkeys(found))


def name_full_folder(reason: str, folder: Path) -> str:
    """Return the reason of a failure in `folder`, with its path where that is what matters and is not said."""
    return f"{reason}: {folder}" if NO_SPACE in reason and str(folder) not in reason else reason


_SUPERVISOR_DIED = (
    "its supervisor died without a word (killed, or out of memory), and its instances with it; "
    "a further try, or submitting it again, starts it anew"
)


class JobFolder:
    """What is kept of one job while it exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.status_file = path / "status.json"
        self.supervisor_lock = path / "supervisor.lock"
        self.processes_lock = path / "processes.lock"
        self.address_file = path / "address"

    def read_status(self) -> JobStatus | None:
        """Return the job's status, None when there is no such job. A supervisor that died makes it a failed one."""
        status = self._read_status()
        if status and not status.has_ended and not locks.is_held(self.supervisor_lock):
            status = self._read_status()  # it may have ended properly since
            if status and not status.has_ended:
                status = _failed_by_dead_supervisor(status)
        return status and msgspec.structs.replace(status, result=self._read_result())

    def write_status(self, status: JobStatus) -> None:
        """Replace the status in one step: readers see the old one or the new one."""
        write_atomically(self.status_file, msgspec.json.encode(status))

    def result_file(self, index: int) -> Path:
        return self.path / "results" / f"{index}.json"

    def remove(self) -> None:
        """Remove the folder, and the socket if that lies elsewhere. A job of the same name may be made meanwhile."""
        with suppress(OSError):
            socket = self.address()
            if socket.parent != self.path:
                socket.unlink(missing_ok=True)
                socket.parent.rmdir()
        rubbish = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent))
        with suppress(FileNotFoundError):
            self.path.replace(rubbish)
        shutil.rmtree(rubbish, ignore_errors=True)

    def address(self) -> Path:
        """Return the path of the supervisor's socket. Raises FileNotFoundError when the job is gone."""
        return Path(self.address_file.read_text())

    def kill_supervisor(self) -> None:
        """Kill the supervisor, if it lives, and so all of its instances."""
        with suppress(FileNotFoundError, ProcessLookupError):
            pid = int(self.supervisor_lock.read_text())
            if locks.is_held(self.supervisor_lock):
                os.kill(pid, signal.SIGKILL)

    def _read_status(self) -> JobStatus | None:
        try:
            return JsonDecoder(JobStatus).decode(self.status_file.read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):  # torn by a crash of the machine: nothing of it runs
            return None

    def _read_result(self) -> dict[str, Any] | None:
        """Return the newest: who is the first of an elastic training changes, and each that leaves writes one."""
        for file in sorted((self.path / "results").glob("*.json"), key=_changed_at, reverse=True):
            with suppress(FileNotFoundError, msgspec.DecodeError), file.open("rb") as content:
                return JsonDecoder(dict[str, Any]).decode(content.read(RESULT_LIMIT))
        return None


class WorkFolder:
    """The local backend's work folder: all jobs and their logs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Make the folder and its parts, those that are missing. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        for part in ("jobs", "locks", "runs"):
            (self.path / part).mkdir(exist_ok=True, mode=0o700)

    def job(self, name: str) -> JobFolder:
        return JobFolder(self.path / "jobs" / name)

    def jobs(self) -> list[str]:
        """Return the names of all jobs, sorted."""
        return _visible_names(self.path / "jobs")

    def new_job(self, name: str) -> JobFolder:
        """Make a hidden folder for a job to be, and remove those of earlier ones that never came to be.

        Call it with the job's lock held.
        """
        for rubbish in (self.path / "jobs").glob(f".{name}.*"):
            shutil.rmtree(rubbish, ignore_errors=True)
        return JobFolder(Path(tempfile.mkdtemp(prefix=f".{name}.", dir=self.path / "jobs")))

    def lock(self, name: str) -> Path:
        return self.path / "locks" / name

    def locks(self) -> list[Path]:
        """Return the locks that there are, of jobs and of what once was one."""
        return [self.lock(name) for name in _visible_names(self.path / "locks")]

    def run_folder(self, status: JobStatus) -> Path:
        """Return where the logs of this run of the job are, and the folders that it works in."""
        started = datetime.fromtimestamp(status.created_at, UTC)
        return self.path / "runs" / status.name / f"{started:%Y%m%dT%H%M%S.%fZ}-{status.digest[:8]}"

    def runs(self, name: str) -> list[Path]:
        """Return the folders of the runs that are kept, oldest first; empty for a job that never was."""
        folder = self.path / "runs" / name
        return [folder / run for run in _visible_names(folder)]

    def logged(self) -> list[str]:
        """Return the names of all jobs of which runs are kept, sorted."""
        return _visible_names(self.path / "runs")

    def new_run(self, status: JobStatus) -> None:
        """Make the folder for a new run."""
        self.run_folder(status).mkdir(parents=True, mode=0o700)
        self.keep_owner(status)

    def keep_owner(self, status: JobStatus) -> None:
        """Write down whose the job's run is; that outlives the job, as its logs do."""
        with suppress(FileNotFoundError):  # kept runs are limited
            write_atomically(self.run_folder(status) / "owner", token_owner(status.token).encode())

    def owner(self, run: Path) -> str:
        """Return whose the run in this folder is, empty for nobody's."""
        with suppress(FileNotFoundError):
            return (run / "owner").read_text()
        return ""


def write_atomically(file: Path, content: bytes) -> None:
    """Write `file` so that readers see what it was or `content`, never a part."""
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


def _failed_by_dead_supervisor(status: JobStatus) -> JobStatus:
    return msgspec.structs.replace(
        status,
        phase="failed",
        scaling=None,
        reason=_SUPERVISOR_DIED,
        instances=tuple(map(_killed, status.instances)),
    )


def _killed(instance: InstanceStatus) -> InstanceStatus:
    if instance.phase != "running":
        return instance
    return msgspec.structs.replace(instance, phase="failed", exit_code=-signal.SIGKILL)


# Which runs are kept, so that jobs of ever new names don't fill the disk.

MAX_RUNS_OF_JOB = 5
"""How many runs of one job are kept, the newest."""

MAX_RUNS_OF_REMOVED_JOBS = 200
"""How many runs of all jobs that are gone are kept, the newest."""


def prune_runs(work: WorkFolder, name: str) -> None:
    """Drop what is beyond these limits: runs of the job `name`, which is the caller's, and of jobs that are gone.

    The locks of those go, too. What is being started or stopped at the moment is left alone.
    """
    for run in work.runs(name)[:-MAX_RUNS_OF_JOB]:
        shutil.rmtree(run, ignore_errors=True)
    locked = {lock.name for lock in work.locks()}
    gone = {*locked, *work.logged()}.difference(work.jobs())
    runs = sorted((run for gone_name in gone for run in work.runs(gone_name)), key=lambda run: run.name)
    surplus = {run.parent.name for run in runs[:-MAX_RUNS_OF_REMOVED_JOBS]}
    for gone_name in gone & (locked | surplus):
        _remove_old_runs(
            work, gone_name, {run.name for run in runs[:-MAX_RUNS_OF_REMOVED_JOBS] if run.parent.name == gone_name}
        )


def _remove_old_runs(work: WorkFolder, name: str, surplus: set[str]) -> None:
    """Remove these runs of a job that is gone, and what keeps its name if nobody uses that now."""
    lock = work.lock(name)
    descriptor = locks.take(lock)
    if descriptor is None:
        return
    try:
        if work.job(name).path.exists():
            return
        for run in work.runs(name):
            if run.name in surplus:
                shutil.rmtree(run, ignore_errors=True)
        with suppress(OSError):
            (work.path / "runs" / name).rmdir()  # only when no run is left
        lock.unlink()
    finally:
        os.close(descriptor)
