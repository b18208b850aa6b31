"""Elastic training in a real Airflow: a short night of the nightly DAG, and the runs that its checkpoints start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from laptop.client import DagRun
from support.airflow.shared import Airflow, beside_others

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1500)]

EVALUATION = "edl_evaluate_on_checkpoint"


@beside_others
def test_a_short_night_trains_grows_ends_in_time_and_is_evaluated(airflow: Airflow) -> None:
    """Its result says that it was stopped; each checkpoint that lands is an event that an evaluation gets."""
    client = airflow.client
    airflow.laptop.wait_for_dag(client, EVALUATION)
    client.unpause(EVALUATION)
    said: list[str] = []
    run, night = grown_night(airflow, "edl_nightly_elastic_training", said)
    log = "\n".join(client.log(run, next(task for task in client.tasks(run) if task.task_id == "train")))
    for instance in (0, 1):
        line = rf"\[{instance}(?: rank {instance})?\] continues from step \d+ as one of {instance + 1}"
        shown = re.findall(line, log)
        assert len(shown) == len(set(shown)) > 0, log  # more than one where a slow machine met once more
    assert any(line.startswith("train: step ") and "2 instances" in line for line in said)

    airflow.until(lambda: not client.runs(EVALUATION, ["queued", "running"]) and client.runs(EVALUATION, ["success"]))
    found = client.xcom(client.runs(EVALUATION, ["success"])[0], "evaluate")
    assert found["step"] <= night["step"]
    assert Path(found["checkpoint"]).parent == Path(night["checkpoint"]).parent
    assert found["accuracy"] > 0.5
    airflow.pause(EVALUATION)
    airflow.nothing_is_left(night["job"])


def grown_night(airflow: Airflow, dag_id: str, said: list[str]) -> tuple[DagRun, dict[str, Any]]:
    """Return a night that was long enough to grow in, and its result; a machine that was too slow has a longer one."""
    for ends_by in ("PT2M30S", "PT8M"):
        said.clear()
        run = airflow.run(dag_id, {"ends_by": ends_by, "trainers_max": 2, "pause_s": 0.05}, said.append)
        night: dict[str, Any] = airflow.client.xcom(run, "train")
        if night["generations"] >= 2:
            break
    assert night["stopped"] is True
    assert night["generations"] >= 2
    assert night["step"] > 0
    assert Path(night["checkpoint"]).is_dir()
    assert airflow.client.xcom(run, "grow")["job"] == night["job"]
    return run, night
