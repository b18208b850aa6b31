"""Which runs are kept, so that jobs of ever new names don't fill the disk."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

from edl_runtime import locks
from edl_runtime.backends.local.folders import WorkFolder

KEPT_RUNS = 5
"""How many runs of one job are kept, the newest."""

KEPT_RUNS_IN_ALL = 200
"""How many runs of all jobs that are gone are kept, the newest."""


def prune(work: WorkFolder, name: str) -> None:
    """Drop what is beyond these limits: runs of the job `name`, which is the caller's, and of jobs that are gone.

    The locks of those go, too. What is being started or stopped at the moment is left alone.
    """
    for run in work.runs(name)[:-KEPT_RUNS]:
        shutil.rmtree(run, ignore_errors=True)
    locked = {lock.name for lock in work.locks()}
    gone = {*locked, *work.logged()}.difference(work.jobs())
    runs = sorted((run for gone_name in gone for run in work.runs(gone_name)), key=lambda run: run.name)
    surplus = {run.parent.name for run in runs[:-KEPT_RUNS_IN_ALL]}
    for gone_name in gone & (locked | surplus):
        _drop(work, gone_name, {run.name for run in runs[:-KEPT_RUNS_IN_ALL] if run.parent.name == gone_name})


def _drop(work: WorkFolder, name: str, surplus: set[str]) -> None:
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
