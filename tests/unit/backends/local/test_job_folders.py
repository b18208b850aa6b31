"""What the local backend keeps of a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.special_files import SPECIAL, put

from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.local.job_folders import JobFolder, tail
from edl_runtime.errors import DamagedFileError


def test_the_newest_result_counts(tmp_path: Path) -> None:
    """Whichever instance left it: who wrote an earlier one was the first only then. A damaged one is passed by."""
    folder = JobFolder(tmp_path)
    folder.write_status(
        JobStatus(name="job", kind="trainer", phase="succeeded", token="", digest="", wanted=4, created_at=1.0)
    )
    left = [
        ('{"checkpoint": "old"}', 100),
        ('{"checkpoint": "new"}', 300),
        ('{"checkpoint": "older"}', 50),
        ("{", 400),
        ('{"x":' + "[" * 4000, 500),
    ]
    for index, (content, changed_at) in enumerate(left):
        file = folder.result_file(index)
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
        os.utime(file, (changed_at, changed_at))
    status = folder.read_status()
    assert status is not None
    assert status.result == {"checkpoint": "new"}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_holds_up_no_reader(tmp_path: Path, kind: str) -> None:
    """Neither as a status, a lock or an address, nor as a result or log."""
    folder = JobFolder(tmp_path)
    status = JobStatus(name="job", kind="trainer", phase="running", token="", digest="", wanted=1, created_at=1.0)
    folder.write_status(status)
    folder.result_file(0).parent.mkdir()
    put(kind, folder.result_file(0))
    put(kind, folder.supervisor_lock)
    found = folder.read_status()
    assert found is not None
    assert (found.phase, found.result) == ("failed", None)
    put(kind, folder.address_file)
    with pytest.raises(DamagedFileError):
        folder.address()
    put(kind, folder.status_file)
    assert folder.read_status() is None
    if kind != "endless":
        put(kind, tmp_path / "0.log")
        assert tail(tmp_path / "0.log") == []


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"name":"\xff"}', b'{"x":' + b"[" * 100_000])
def test_a_torn_status_is_none(tmp_path: Path, content: bytes) -> None:
    """Whatever is left of it."""
    folder = JobFolder(tmp_path)
    folder.status_file.write_bytes(content)
    assert folder.read_status() is None
