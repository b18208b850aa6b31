"""Rescaling in a real Airflow: a new job triggers it, a page shows it, and a user approves a shrink."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from laptop.client import DagRun
from support.airflow.shared import Airflow, in_parallel

from edl_runtime.backends.local.backend import LocalBackend

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

READ_S = 5.0
"""Wait before an answer: Airflow may lose one that comes within seconds, and the task then asks again."""


@in_parallel
def test_a_new_job_grows_and_shrinks_after_approval(airflow: Airflow) -> None:
    """An asset triggers the first run; the second waits for approval before the job shrinks; another job grows, too."""
    client = airflow.client
    airflow.laptop.wait_for_dag(client, "rescales")
    client.unpause("rescales")
    first = airflow.begin("submits", {"job": "first"})
    _wait_for_sizes(airflow, {"first": (3, 3)})
    airflow.wait_until(lambda: client.runs("rescales", ["success"]))
    grows = client.runs("rescales", ["success"])[-1]
    assert grows.run_id.startswith("asset_triggered")
    result = client.xcom(grows, "rescale")
    assert [(one["name"], one["instances"], one["target"]) for one in result["targets"]] == [("first", 1, 3)]
    assert result["window"] == "always"
    _wait_for_reason(airflow, "grows from 1 to 3")
    assert _overview(airflow)["cluster"]["window"] == "always"
    assert client.links(grows, "rescale")["Rescaling"] == "/edl/?conn=edl_rescaled"

    shrinks = client.trigger("rescales", {"cpus": 0.0015})
    question = _answered(airflow, shrinks)
    assert question["subject"] == "Shrink jobs or pools?"
    assert "- first shrinks from 3 to 1" in question["body"]
    assert client.xcom(shrinks, "rescale")["targets"][0]["target"] == 1
    _wait_for_sizes(airflow, {"first": (1, 1)})
    _wait_for_reason(airflow, "shrinks from 3 to 1")

    second = airflow.begin("submits", {"job": "second"})
    airflow.wait_until(lambda: _sizes(airflow).get("second", (0, 0))[0] == 2, lambda: str(_sizes(airflow)))
    assert _sizes(airflow)["first"][0] == 1  # in its cooldown

    airflow.pause("rescales")
    for run in (first, second):
        client.fail(run)
    _wait_for_sizes(airflow, {})


def _answered(airflow: Airflow, run: DagRun) -> dict[str, Any]:
    """Approve all questions of the run until it has ended; return the first."""
    client = airflow.client
    path = f"/api/v2/dags/{run.dag_id}/dagRuns/{run.run_id}/taskInstances/approve/-1/hitlDetails"
    asked: list[dict[str, Any]] = []
    seen_at: dict[int, float] = {}

    def has_ended() -> bool:
        task = next(task for task in client.tasks(run) if task.task_id == "approve")
        if task.state == "awaiting_input":
            assert asked or _sizes(airflow) == {"first": (3, 3)}
            question = client._ask("GET", path)
            is_read = time.monotonic() - seen_at.setdefault(task.try_number, time.monotonic()) > READ_S
            if is_read and not question["response_received"]:
                asked.append(question)
                client._ask("PATCH", path, json={"chosen_options": ["Approve"], "params_input": {}})
        return client.state(run) in ("success", "failed")

    airflow.wait_until(has_ended, lambda: f"{client.tasks(run)}")
    assert client.state(run) == "success", client.tasks(run)
    return asked[0]


def _overview(airflow: Airflow) -> dict[str, Any]:
    """Return what the page shows of the connection."""
    return airflow.shown("overview", conn="edl_rescaled")


def _wait_for_reason(airflow: Airflow, reason: str) -> None:
    """Wait until the page, which reads the jobs every few seconds, has it for one of them."""
    airflow.wait_until(
        lambda: any(reason in job["reason"] for job in _overview(airflow)["jobs"]),
        lambda: str(_overview(airflow)["jobs"]),
    )


def _sizes(airflow: Airflow) -> dict[str, tuple[int, int]]:
    """Return the wanted and the running instances of each job."""
    jobs = asyncio.run(LocalBackend(airflow.rescaled).list())
    return {job.name: (job.wanted, sum(one.phase == "running" for one in job.instances)) for job in jobs}


def _wait_for_sizes(airflow: Airflow, sizes: dict[str, tuple[int, int]]) -> None:
    airflow.wait_until(lambda: _sizes(airflow) == sizes, lambda: str(_sizes(airflow)))
