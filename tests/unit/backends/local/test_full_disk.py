"""Which folder is full."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from edl_runtime.backends.local.job_folders import NO_SPACE, full_folders, name_full_folder


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
