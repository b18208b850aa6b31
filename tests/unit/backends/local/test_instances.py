"""What is said of an instance that has failed."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from edl_runtime.backends.local.instances import FailureDetail, InstanceLauncher, ProcessTable
from edl_runtime.backends.local.job_folders import NO_SPACE, JobFolder
from edl_runtime.specs import Bounds, JobSpec

WHY = "ModuleNotFoundError: No module named 'nets'"
FULL = f"OSError: [Errno 28] {NO_SPACE}"


@pytest.mark.parametrize(
    ("line", "full", "where"),
    [
        (FULL, ("kept",), "; no space is left in {0}/kept"),
        (FULL, ("run", "kept", "work"), "; no space is left in {0}/work, {0}/kept, {0}/run"),
        (FULL, ("other",), ""),
        ("ValueError: loss is not a number", ("kept",), ""),
    ],
)
def test_a_failure_for_want_of_space_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, full: tuple[str, ...], where: str
) -> None:
    """Of those that the instance writes in: where it starts, its checkpoints' and its log's."""
    usage = {True: SimpleNamespace(free=0), False: SimpleNamespace(free=1 << 30)}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage[folder.name in full])
    run = tmp_path / "run"
    run.mkdir()
    (run / "3.log").write_text(f"at step 7\n{line}\n")
    instances = InstanceLauncher(
        JobSpec(
            name="student",
            kind="trainer",
            command=("python", "train.py"),
            bounds=Bounds(1, 1),
            instances=1,
            cwd=str(tmp_path / "work"),
            env={"EDL_CHECKPOINT": str(tmp_path / "kept")},
        ),
        folder=JobFolder(tmp_path / "jobs" / "student"),
        run_folder=run,
        processes=ProcessTable(lock=-1),  # none is started
        environ={},
        secrets={},
    )
    assert instances.failure(3, "exited with code 1") == FailureDetail(
        f"instance 3 exited with code 1{where.format(tmp_path)}", ("at step 7", line)
    )


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
    instances = InstanceLauncher(
        spec, folder=JobFolder(tmp_path), run_folder=tmp_path, processes=ProcessTable(lock=0), environ={}, secrets={}
    )
    found = instances.failure(1, "exited with 1")
    assert (found.reason, found.last_lines) == (reason, tuple(log.splitlines()))
