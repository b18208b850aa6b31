"""The reader in scripts of its own: what they see when they end, and what the benchmark prints."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.paths import BENCHMARKS
from support.teachers.process import running_teacher

BENCHMARK = BENCHMARKS / "distill_reader.py"

SCRIPT = """
import sys
import numpy as np
from edl_runtime.distill import DistillReader
source = [(np.zeros((4, 4), np.float32),)] * 1000
reader = DistillReader(source, inputs=["x"], outputs=["double"])
print(len(next(iter(reader))))
iterator = iter(reader)
next(iterator)
"""


def test_a_script_that_closes_nothing_ends() -> None:
    """Neither threads nor an epoch that was left open keep a process alive, and nothing is said about them."""
    with running_teacher("support.models:arithmetic") as teacher:
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", SCRIPT],
            env={"EDL_TEACHERS": teacher.address},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "2\n", "")


@pytest.mark.parametrize("kind", ["sample", "sample_list", "batch"])
def test_the_benchmark_ends_with_one_json_object(kind: str) -> None:
    """Its last line has the unit in each key, and figures that fit each other."""
    command = [sys.executable, str(BENCHMARK), "--data", "img28", "--format", kind, "--batches", "20", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures["samples_per_s"] > 0
    assert figures["ratio"] == pytest.approx(figures["samples_per_s"] / figures["plain_samples_per_s"], rel=0.01)
    assert figures["student_cpu_ms_per_batch"] > 0


@pytest.mark.parametrize("flag", ["--batches=-1", "--teachers=0", "--batch-size=0"])
def test_the_benchmark_refuses_what_can_t_be_measured(flag: str) -> None:
    """It names the flag, and prints no figures."""
    ran = subprocess.run(
        [sys.executable, str(BENCHMARK), flag], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"argument {flag.partition('=')[0]}: got" in ran.stderr
