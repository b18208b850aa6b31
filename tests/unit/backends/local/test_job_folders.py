"""What the local backend keeps of a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.local.job_folders import JobFolder


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


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"name":"\xff"}', b'{"x":' + b"[" * 100_000])
def test_a_torn_status_is_none(tmp_path: Path, content: bytes) -> None:
    """Whatever is left of it."""
    folder = JobFolder(tmp_path)
    folder.status_file.write_bytes(content)
    assert folder.read_status() is None
