"""Runs the scripts of an example: its teacher's training, and its student by `edl compare`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import msgspec
import pytest
from support.paths import EXAMPLES

PURE = "--use_distill_service=no"


def train_teacher(example: str, folder: Path, *flags: str) -> str:
    """Train a teacher in `folder`; return what the script printed."""
    command = [sys.executable, str(EXAMPLES / example / "train_teacher.py"), "--model_dir", "teacher", *flags]
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def compare(example: str, folder: Path, *flags: str, ways: str = "none,service") -> dict[str, Any]:
    """Train students, two for each way, by `edl compare`; return its rows by way.

    One fails where the teachers were not asked.
    """
    command = [sys.executable, "-m", "edl_runtime.cli", "compare", "--json", "--model", "teacher"]
    command += ["--outputs", "logits=fetch_name_0", "--ways", ways, "--pure", PURE, "--repeat", "2", "--"]
    script = str(EXAMPLES / example / "student.py")
    command += ["python", script, "--use_distill_service", "--seed={seed}", "--curves=curves", *flags]
    done = subprocess.run(command, cwd=folder, check=False, stdout=subprocess.PIPE, text=True)
    rows = {row["way"]: row for row in msgspec.json.decode(done.stdout)}
    assert bool(done.returncode) == any(row["reason"] for row in rows.values()), done.stdout
    return rows


def check_refuses_data(example: str, folder: Path, refusal: str) -> None:
    """Check that an empty folder ends both scripts as a job that is not tried again, and without a traceback."""
    for script in ("train_teacher.py", "student.py"):
        command = [sys.executable, str(EXAMPLES / example / script), f"--data_dir={folder}"]
        done = subprocess.run(command, cwd=folder, check=False, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 65
        assert f"{script}: {folder}: {refusal}" in done.stderr
        assert "Traceback" not in done.stderr


def real_data(name: str) -> Path:
    """Return the folder of a data set of `make datasets`; skips the test, with the reason, where there is none."""
    folder = datasets.DATASETS / name
    unavailable = folder / "unavailable"
    if not folder.is_dir() or unavailable.exists():
        reason = unavailable.read_text().strip() if unavailable.exists() else "run `make datasets`"
        pytest.skip(f"{name} is not in {folder}: {reason}")
    return folder
