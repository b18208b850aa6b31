"""The benchmarks run, and tell what the README says they measure. How fast anything is, is for people to judge."""

from __future__ import annotations

import json
import runpy
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
    """By a bare socket, by a connection to a teacher, and by one that shares memory."""
    found = result_of("wire.py", "--rounds", "1")
    assert found.keys() == {"9.6 MB", "200 KB"}
    for one in found.values():
        assert all(one[f"{way}_server_cpu_ms"] > 0 for way in ("bare", "socket", "shared_memory"))


def test_sharing_out_is_measured_for_pools_of_all_sizes() -> None:
    """Every student computes it at each change."""
    found = result_of("assign.py", "--rounds", "1")
    assert found["3 teachers, 3 students, weights alike"] > 0
    assert found["1000 teachers, 1000 students, weights alike"] > 0


def test_reading_is_measured_against_the_source_and_against_another_option() -> None:
    """One run tells plain, distilled and what was asked to be compared."""
    found = result_of("distill_reader.py", "--data", "img28", "--batches", "5", "--against", "teachers=1")
    assert (found["batches"], found["teachers"], found["other"]) == (5, 2, "teachers=1")
    for name in ("ratio", "ratio_to_other", "student_cpu_ms_per_batch", "plain_cpu_ms_per_batch"):
        assert found[name] > 0


@pytest.mark.deep
def test_samples_are_held_for_a_batch() -> None:
    """In the format "sample", the ratio for a consumer that drops each at once stands beside."""
    flags = ("--data", "img224", "--format", "sample", "--batches", "4", "--dtype", "uint8")
    found = result_of("distill_reader.py", *flags)
    assert {"ratio", "ratio_dropped_at_once"} <= found.keys()


@pytest.mark.parametrize(
    "flags", ["--against teachers=none", "--against foo=1", "--against foo", "--data tok128 --dtype uint8"]
)
def test_a_wrong_comparison_is_refused(
    flags: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What can't be compared is said before anything runs."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["distill_reader.py", *flags.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / "distill_reader.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "teachers" in capsys.readouterr().err


def test_a_student_is_measured_with_distillation_and_without() -> None:
    """Both make the same steps, and what the student waited is told."""
    found = result_of("distill_vs_pure.py", "--case", "quick", "--epochs", "1", "--steps", "2")
    assert (found["epochs"], found["steps_an_epoch"], found["teachers"]) == (1, 2, 2)
    assert found["ratio"] > 0
    assert found["waited_ms_per_step"] >= 0
