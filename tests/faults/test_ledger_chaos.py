"""Trainings whose processes are killed, stopped and sent back to checkpoints, by the dozen."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.depth import DEEP, examples
from support.paths import SUPPORT

SCRIPT = SUPPORT / "ledger" / "chaos.py"
AT_ONCE = examples(1, 2)


def trained(redis_url: str, folder: Path, seeds: Sequence[int], *options: str) -> list[Counter[str]]:
    """Return what came of the runs with these seeds."""
    command = [sys.executable, str(SCRIPT), *options, redis_url, str(folder)]
    parts = [[str(seed) for seed in seeds[start::AT_ONCE]] for start in range(AT_ONCE)]
    running = [subprocess.Popen([*command, *part], stdout=subprocess.PIPE, text=True) for part in parts]
    try:
        said = "".join(process.communicate()[0] for process in running)
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0] * AT_ONCE
    return [Counter(json.loads(line)) for line in said.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trainings_under_fire_miss_nothing_and_double_nothing(redis_url: str, tmp_path: Path) -> None:
    """Each record is in the model once an epoch in every run, and whoever was left behind was refused."""
    count = examples(3, 60)
    runs = trained(redis_url, tmp_path, range(count))
    assert len(runs) == count
    assert [run["seed"] for run in runs if run["missing"] or run["doubled"]] == []
    together = sum(runs, Counter())
    assert together["not refused"] == 0
    assert together["deaths"] > 2 * count
    if DEEP:
        assert together["refused"] > 10
        assert together["rollbacks"] > 30
        assert together["saved ahead"] > 5
        assert together["forgotten"] > 10


@pytest.mark.deep
def test_a_queue_that_stays_when_the_model_goes_back_loses_records(redis_url: str, tmp_path: Path) -> None:
    """The same runs without going back of the ledger: the test above can fail."""
    runs = trained(redis_url, tmp_path, range(8), "--ack-only")
    went_back = [run for run in runs if run["rollbacks"]]
    assert len(went_back) > 2
    assert [run["seed"] for run in went_back if run["missing"]]
    assert all(run["missing"] or run["doubled"] for run in went_back if run["rollbacks"] > 2)
