"""The local backend's processes, as the operating system lists them."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
from support.backends import jobs

from edl_runtime.backends.local.job_folders import WorkFolder
from edl_runtime.specs import JobKind, JobSpec

WITHIN_S = 60.0


def job(code: str, work_dir: Path, *, kind: JobKind = "pool", instances: int = 1, grace_s: float = 5.0) -> JobSpec:
    """Return the spec of a job whose processes `processes` finds by a variable."""
    env = {"STARTED_BY_TEST_IN": str(work_dir)}
    return jobs.job(code, kind=kind, instances=instances, env=env, grace_s=grace_s)


def processes(work_dir: Path) -> list[psutil.Process]:
    """Return the processes of all jobs in the work folder: supervisors, instances and all that these started."""
    found = []
    for process in psutil.process_iter():
        try:
            is_marked = process.environ().get("STARTED_BY_TEST_IN") == str(work_dir)
            supervises = any(word.startswith(str(work_dir)) for word in process.cmdline())
        except psutil.Error:  # it has just ended, or is a zombie
            continue
        if is_marked or supervises:
            found.append(process)
    return found


def supervisor(work_dir: Path) -> psutil.Process:
    return psutil.Process(int(WorkFolder(work_dir).job("job").supervisor_lock.read_text()))


def wait_until_gone(work_dir: Path) -> None:
    """Wait until no process of the work folder's jobs is left."""
    deadline = time.monotonic() + WITHIN_S
    while left := processes(work_dir):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def below(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(folder.glob(pattern))
