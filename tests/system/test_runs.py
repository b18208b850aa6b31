"""Runs of our DAGs in a real Airflow: API server, scheduler, triggerer, DAG processor, and the real example."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from laptop.client import AirflowClient, DagRun
from laptop.launcher import Laptop
from support.airflow.shared import Airflow, in_parallel

from edl_runtime.backends.errors import JobFailedError
from edl_runtime.backends.local.backend import LocalBackend

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1500)]


@in_parallel
def test_the_quickstart_grows_its_pool_while_the_student_trains(airflow: Airflow) -> None:
    """The student uses the two later teachers without a restart, and returns a typed result and a table."""
    client = airflow.client
    lines: list[str] = []
    for epochs in (20, 60, 180, 540):  # more on a machine that is too slow to grow the pool in time
        lines.clear()
        run = airflow.run("edl_quickstart_distill", {"epochs": epochs, "seed": 5}, lines.append)
        result = client.xcom(run, "distill")
        are_told = any(line.startswith("distill: step ") and "3 teachers" in line for line in lines)
        if are_told and len(result["metrics"]["answered"]) == 3:
            break

    assert set(result) == {"job", "pool", "checkpoint", "metrics", "answered", "not_finite"}
    assert result["not_finite"] == {}
    assert result["metrics"]["seeds"] == [5, 6, 7]
    assert len(result["metrics"]["answered"]) == 3
    assert sum(result["metrics"]["answered"].values()) == 3 * epochs * 62 + 1  # one for the held-out digits
    assert set(client.xcom(run, "grow_pool")["teachers"]) == set(result["metrics"]["answered"])
    log = student_log(airflow.laptop, result["job"])
    assert [line for line in log if line.startswith("alone, seed 5")] == log[:1]
    assert_plausible(result)
    assert safetensors.numpy.load_file(result["checkpoint"])["1.weight"].shape == (28 * 28, 32)
    assert_kept(client, run, result)
    assert are_told
    airflow.wait_until_nothing_remains(result["job"], result["pool"])


@pytest.mark.deep
@in_parallel
def test_the_quickstart_succeeds_when_its_student_ends_before_the_pool_grows(airflow: Airflow) -> None:
    """No task fails, and there is a report."""
    run = airflow.run("edl_quickstart_distill", {"epochs": 1})
    states = {task.task_id: task.state for task in airflow.client.tasks(run)}
    assert states.pop("pool_in_use") in ("success", "skipped")
    assert states.pop("grow_pool") in ("success", "skipped")
    assert set(states.values()) == {"success"}
    result = airflow.client.xcom(run, "distill")
    airflow.wait_until_nothing_remains(result["job"], result["pool"])


def test_the_edl_command_uses_the_variables_of_edl_sh(airflow: Airflow) -> None:
    """A shell that has sourced `edl.sh` needs no address and no password."""
    variables = airflow.laptop.edl_variables
    script = '. "$0" && exec "$1" -m edl_runtime.cli pools --json'
    shell = ["sh", "-c", script, str(variables), sys.executable]
    found = subprocess.run(shell, capture_output=True, check=True, text=True)
    assert isinstance(json.loads(found.stdout), list)


@in_parallel
def test_the_steps_share_a_pool_that_their_teardown_stops(airflow: Airflow) -> None:
    """The pool of a setup task serves the student of another task, and is stopped by the teardown."""
    client = airflow.client
    run = airflow.run("edl_distill_steps", {"teachers": 2, "epochs": 3})

    pool = client.xcom(run, "start_pool")
    result = client.xcom(run, "distill")
    assert len(pool["teachers"]) == 2
    assert client.xcom(run, "pool_ready") == pool
    assert set(result["metrics"]["answered"]) == set(pool["teachers"])
    assert_kept(client, run, result)
    airflow.wait_until_nothing_remains(result["job"], result["pool"])


@in_parallel
def test_following_a_failing_run_raises_an_error_with_the_task_and_its_last_lines(airflow: Airflow) -> None:
    """Of the task that failed."""
    with pytest.raises(JobFailedError, match=r"fails\.give_up") as caught:
        airflow.run("fails", {})
    assert "no digits today" in str(caught.value)


def assert_plausible(result: dict[str, Any]) -> None:
    metrics = result["metrics"]
    assert metrics["teacher_accuracy"] > 0.9
    assert metrics["distilled"]["accuracy_mean"] > metrics["alone"]["accuracy_mean"] + 0.03
    for way in (metrics["alone"], metrics["distilled"]):
        assert len(way["accuracies"]) == 3
        assert way["accuracy_spread"] > 0
        assert way["samples_per_s"] > 0


def assert_kept(client: AirflowClient, run: DagRun, result: dict[str, Any]) -> None:
    numbers = Path(client.xcom(run, "report"))
    assert json.loads(numbers.read_text()) == result
    table = numbers.with_suffix(".txt").read_text()
    for text in ("teacher", "student alone", "student distilled", "samples/s", *result["metrics"]["answered"]):
        assert text in table


def student_log(laptop: Laptop, job: str) -> list[str]:
    async def read() -> list[str]:
        return [line.text async for line in LocalBackend(laptop.work_dir).logs(job)]

    return [line for line in asyncio.run(read()) if line.startswith(("alone", "distilled"))]
