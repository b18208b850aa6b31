"""The benchmarks run, and tell what the README says they measure. How fast anything is, is for people to judge."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from support.paths import BENCHMARKS

pytestmark = pytest.mark.slow


def result_of(script: str, *options: str) -> Any:
    """Run a benchmark; return the object on its last line."""
    command = [sys.executable, str(BENCHMARKS / script), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_wire_is_measured_both_ways() -> None:
    """A teacher that shares memory with its client spends a fraction of what it does at the socket."""
    found = result_of("wire.py", "--rounds", "1")
    assert all(one["bare_cpu_ms"] > 0 for one in found.values())
    large = found["9.6 MB"]
    assert large["shared_memory_server_cpu_ms"] < large["socket_server_cpu_ms"] / 2


def test_large_pools_are_shared_out_in_no_time() -> None:
    """Every student computes it at each change: 50 ms for 1000 by 1000; ten times that is allowed."""
    found = result_of("assign.py", "--rounds", "1")
    assert found["3 teachers, 3 students, weights alike"] > 0
    assert found["1000 teachers, 1000 students, weights alike"] < 500


def test_reading_is_measured_against_the_source_and_against_another_option() -> None:
    """One run tells plain, distilled and what was asked to be compared."""
    found = result_of("distill_reader.py", "--data", "img28", "--batches", "20", "--against", "teachers=1")
    assert (found["batches"], found["teachers"], found["other"]) == (20, 2, "teachers=1")
    assert 0 < found["ratio"] < 1
    assert found["ratio_to_other"] > 0
    assert found["student_cpu_ms_per_batch"] > found["plain_cpu_ms_per_batch"]


def test_samples_are_held_for_a_batch() -> None:
    """In the format "sample", the ratio for a consumer that drops each at once stands beside."""
    found = result_of(
        "distill_reader.py", "--data", "img224", "--format", "sample", "--batches", "4", "--dtype", "uint8"
    )
    assert {"ratio", "ratio_dropped_at_once"} <= found.keys()


@pytest.mark.parametrize(
    "flags",
    [
        ["--against", "teachers=none"],
        ["--against", "foo=1"],
        ["--against", "foo"],
        ["--data", "tok128", "--dtype", "uint8"],
    ],
)
def test_a_wrong_comparison_is_refused(flags: list[str]) -> None:
    """What can't be compared is said before anything runs."""
    command = [sys.executable, str(BENCHMARKS / "distill_reader.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "teachers" in done.stderr


def test_a_student_is_measured_with_distillation_and_without() -> None:
    """Both make the same steps, and what the student waited is told."""
    found = result_of("distill_vs_pure.py", "--case", "quick", "--epochs", "2", "--steps", "3")
    assert (found["epochs"], found["steps_an_epoch"], found["teachers"]) == (2, 3, 2)
    assert found["ratio"] > 0
    assert found["waited_ms_per_step"] >= 0
