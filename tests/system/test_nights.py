"""Elastic training in a real Airflow: a short night of the nightly DAG, and the runs that its checkpoints start."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from system.test_runs import assert_nothing_runs, run_dag

from edl_airflow.laptop.client import AirflowClient, Run
from edl_airflow.laptop.launcher import Laptop

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

EVALUATION = "edl_evaluate_on_checkpoint"
WATCHED_WITHIN_S = 60.0


@pytest.fixture
def evaluations(laptop: Laptop, client: AirflowClient) -> Iterator[list[Run]]:
    """The runs of the evaluation that a test leads to; none starts any more when it is over."""
    laptop.wait_for_dag(client, EVALUATION)
    client.unpause(EVALUATION)
    yield client.runs(EVALUATION)
    client._ask("PATCH", f"/api/v2/dags/{EVALUATION}", json={"is_paused": True})


@pytest.mark.usefixtures("evaluations")
def test_a_short_night_trains_grows_ends_in_time_and_is_evaluated(laptop: Laptop, client: AirflowClient) -> None:
    """Its result says that it was stopped; each checkpoint that lands is an event that an evaluation gets."""
    said: list[str] = []
    conf = {"ends_by": "PT2M30S", "trainers_max": 2, "pause_s": 0.05}
    run = run_dag(laptop, client, "edl_nightly_elastic_training", conf, said)

    night = client.xcom(run, "train")
    assert night["stopped"] is True
    assert night["generations"] >= 2
    assert night["step"] > 0
    assert Path(night["checkpoint"]).is_dir()
    assert client.xcom(run, "grow")["job"] == night["job"]
    log = "\n".join(client.log(run, next(task for task in client.tasks(run) if task.task_id == "train")))
    for instance in (0, 1):
        shown = re.findall(rf"\[{instance}(?: rank {instance})?\] goes on from step \d+ as one of {instance + 1}", log)
        assert len(shown) == 1, log
    assert any(line.startswith("train: step ") and "2 instances" in line for line in said)

    found = _last_evaluation(laptop, client)
    assert found["step"] <= night["step"]
    assert Path(found["checkpoint"]).parent == Path(night["checkpoint"]).parent
    assert found["accuracy"] > 0.5
    assert_nothing_runs(laptop)


def _last_evaluation(laptop: Laptop, client: AirflowClient) -> dict[str, Any]:
    """Wait until an evaluation has succeeded, and none is under way; return what the last one found."""
    deadline = time.monotonic() + WATCHED_WITHIN_S
    while True:
        laptop.check()
        if not client.runs(EVALUATION, ["queued", "running"]) and (done := client.runs(EVALUATION, ["success"])):
            return dict(client.xcom(done[0], "evaluate"))
        assert time.monotonic() < deadline, client.runs(EVALUATION)
        time.sleep(1)
