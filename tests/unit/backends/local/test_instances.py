"""What is wrong with an instance, by the end of its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl_runtime.backends.local.folders import JobFolder
from edl_runtime.backends.local.instances import Instances
from edl_runtime.backends.local.processes import Processes
from edl_runtime.specs import Bounds, JobSpec

WHY = "ModuleNotFoundError: No module named 'nets'"


@pytest.mark.parametrize(
    ("log", "elastic", "reason"),
    [
        (f"Traceback\nedl: instance 1: {WHY}", True, f"instance 1 exited with 1: {WHY}"),
        (
            "edl: instance 0: (InvalidArgument) it is\n  [Hint: odd]",
            True,
            "instance 1 exited with 1: instance 0: (InvalidArgument) it is",
        ),
        ("Traceback", True, "instance 1 exited with 1"),
        ("edl: nothing of ours", False, "instance 1 exited with 1"),
    ],
)
def test_an_agent_s_own_words_are_the_reason(tmp_path: Path, log: str, *, elastic: bool, reason: str) -> None:
    """`edl jobs` and the last line of `edl run` have it from there, also where Redis is gone with the job."""
    (tmp_path / "1.log").write_text(f"{log}\n")
    spec = JobSpec(name="job", kind="trainer", command=("a",), bounds=Bounds(1, 2), instances=2, elastic=elastic)
    instances = Instances(
        spec, folder=JobFolder(tmp_path), run_folder=tmp_path, processes=Processes(lock=0), environ={}, secrets={}
    )
    found = instances.trouble(1, "exited with 1")
    assert (found.reason, found.last_lines) == (reason, tuple(log.splitlines()))
