"""Which folder is full."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.local.job_folders import NO_SPACE, JobFolder, full_folders, name_full_folder


def test_folders_on_a_full_disk_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once; those that are not there are left out."""
    (tmp_path / "full").mkdir()
    usage = shutil.disk_usage

    def of(folder: Path) -> object:
        usage(folder)
        return SimpleNamespace(free=4096 if folder.name == "full" else 1 << 30)

    monkeypatch.setattr(shutil, "disk_usage", of)
    full = tmp_path / "full"
    assert full_folders([tmp_path, full, tmp_path / "none", full]) == [str(full)]


def test_a_full_disk_is_named_where_the_system_does_not() -> None:
    """A write fails by its descriptor, which has no name."""
    reason = f"OSError: [Errno 28] {NO_SPACE}"
    assert name_full_folder(reason, Path("/jobs")) == f"{reason}: /jobs"
    assert name_full_folder(f"{reason}: '/jobs/a'", Path("/jobs")) == f"{reason}: '/jobs/a'"
    assert name_full_folder("denied", Path("/jobs")) == "denied"


@pytest.mark.parametrize(
    ("free", "reason"),
    [
        (0, "the disk of {} is full, so how it ended could not be written; make room, and submit it again"),
        (
            1 << 30,
            "its supervisor died (killed, out of memory, or without room on its disk), and",
        ),
    ],
)
def test_a_supervisor_that_left_no_last_status_had_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, reason: str
) -> None:
    """Rather than that it was killed."""
    folder = JobFolder(tmp_path)
    folder.write_status(
        JobStatus(name="job", kind="pool", phase="running", token="", digest="", wanted=1, created_at=1.0)
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    status = folder.read_status()
    assert status is not None
    assert status.phase == "failed"
    assert status.reason.startswith(reason.format(tmp_path))


def test_a_job_is_removed_from_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has to be made for that."""
    folder = JobFolder(tmp_path / "job")
    folder.path.mkdir()
    folder.status_file.write_bytes(b"{}")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, NO_SPACE)

    monkeypatch.setattr(os, "mkdir", full)
    folder.remove()
    assert list(tmp_path.iterdir()) == []
