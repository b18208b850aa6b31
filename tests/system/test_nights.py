"""Elastic training in a real Airflow: a short run of the nightly DAG, and the runs that its checkpoints trigger."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from laptop.client import DagRun
from support.airflow.shared import Airflow, in_parallel

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1500)]

EVALUATION = "edl_evaluate_on_checkpoint"


@in_parallel
def test_the_nightly_dag_grows_ends_in_time_and_its_checkpoints_are_evaluated(airflow: Airflow) -> None:
    """Its result has `stopped`; each checkpoint is an asset event that triggers an evaluation."""
    client = airflow.client
    airflow.laptop.wait_for_dag(client, EVALUATION)
    client.unpause(EVALUATION)
    lines: list[str] = []
    run, night = grown_night(airflow, "edl_nightly_elastic_training", lines)
    log = "\n".join(client.log(run, next(task for task in client.tasks(run) if task.task_id == "train")))
    found = re.findall(r"\[0(?: rank 0)?\] continues from step \d+ as one of 1", log)
    assert len(found) == len(set(found)) > 0, log  # more than one if a slow machine formed another generation
    assert "[1" not in log  # none has failed, so the first instance's output is enough
    assert any(map(_has_grown, lines))

    airflow.wait_until(
        lambda: not client.runs(EVALUATION, ["queued", "running"]) and client.runs(EVALUATION, ["success"])
    )
    result = client.xcom(client.runs(EVALUATION, ["success"])[0], "evaluate")
    assert result["step"] <= night["step"]
    assert Path(result["checkpoint"]).parent == Path(night["checkpoint"]).parent
    assert result["accuracy"] > 0.5
    airflow.pause(EVALUATION)
    airflow.wait_until_nothing_remains(night["job"])


def grown_night(airflow: Airflow, dag_id: str, lines: list[str]) -> tuple[DagRun, dict[str, Any]]:
    """Return a run that was long enough to grow and tell so, and its result; a slow machine gets a longer one."""
    for ends_by in ("PT2M30S", "PT8M"):
        lines.clear()
        run = airflow.run(dag_id, {"ends_by": ends_by, "trainers_max": 2, "pause_s": 0.05}, lines.append)
        night: dict[str, Any] = airflow.client.xcom(run, "train")
        if night["generations"] >= 2 and any(map(_has_grown, lines)):
            break
    assert night["stopped"] is True
    assert night["generations"] >= 2
    assert night["step"] > 0
    assert Path(night["checkpoint"]).is_dir()
    assert airflow.client.xcom(run, "grow")["job"] == night["job"]
    return run, night


def _has_grown(line: str) -> bool:
    """Whether it is a line of progress by two instances."""
    return line.startswith("train: step ") and "2 instances" in line
