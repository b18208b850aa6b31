"""Runs of our DAGs in a real Airflow: API server, scheduler, triggerer, DAG processor, and the real example."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from edl_airflow.laptop.client import AirflowClient, Run
from edl_airflow.laptop.follow import follow
from edl_airflow.laptop.launcher import Laptop
from edl_runtime.backends.local import LocalBackend
from edl_runtime.errors import JobFailedError
from edl_runtime.registry.directory import Directory
from edl_runtime.store.client import connect

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]


def test_the_quickstart_grows_its_pool_while_the_student_trains(laptop: Laptop, client: AirflowClient) -> None:
    """The student uses the two teachers that come later without a restart, and leaves a typed result and a table."""
    said: list[str] = []
    run = run_dag(laptop, client, "edl_quickstart_distill", {"epochs": 20, "seed": 5}, said)

    result = client.xcom(run, "distill")
    assert set(result) == {"job", "pool", "checkpoint", "metrics", "answered"}
    assert result["metrics"]["seeds"] == [5, 6, 7]
    assert len(result["metrics"]["answered"]) == 3
    assert sum(result["metrics"]["answered"].values()) == 3 * 20 * 62 + 1  # that of the held-out digits
    assert set(client.xcom(run, "grow_pool")["teachers"]) == set(result["metrics"]["answered"])
    log = student_log(laptop, result["job"])
    assert [line for line in log if line.startswith("alone, seed 5")] == log[:1]
    assert_plausible(result)
    assert safetensors.numpy.load_file(result["checkpoint"])["1.weight"].shape == (28 * 28, 32)
    assert_kept(client, run, result)
    assert any(line.startswith("distill: step ") and "3 teachers" in line for line in said)
    assert_nothing_runs(laptop)


def test_the_edl_command_sees_the_laptop(laptop: Laptop) -> None:
    """A shell that reads `edl.sh`, which nobody else may, needs no address and no password."""
    assert stat.S_IMODE(laptop.edl_variables.stat().st_mode) == 0o600
    words = '. "$0" && exec "$1" -m edl_runtime.cli pools --json'
    shell = ["sh", "-c", words, str(laptop.edl_variables), sys.executable]
    found = subprocess.run(shell, capture_output=True, check=True, text=True)
    assert isinstance(json.loads(found.stdout), list)


def test_the_steps_share_a_pool_that_their_teardown_stops(laptop: Laptop, client: AirflowClient) -> None:
    """A pool of a setup task serves the student of another task, and is gone after the teardown."""
    run = run_dag(laptop, client, "edl_distill_steps", {"teachers": 2, "epochs": 3}, [])

    pool = client.xcom(run, "start_pool")
    result = client.xcom(run, "distill")
    assert len(pool["teachers"]) == 2
    assert client.xcom(run, "pool_ready") == pool
    assert set(result["metrics"]["answered"]) == set(pool["teachers"])
    assert_kept(client, run, result)
    assert_nothing_runs(laptop)


def test_a_failing_run_is_told_with_the_task_and_its_last_words(laptop: Laptop, client: AirflowClient) -> None:
    """Who follows a run that fails learns which task it was and the end of its log."""
    with pytest.raises(JobFailedError, match=r"fails\.give_up") as caught:
        run_dag(laptop, client, "fails", {}, [])
    assert "no digits today" in str(caught.value)


def run_dag(laptop: Laptop, client: AirflowClient, dag_id: str, conf: dict[str, Any], said: list[str]) -> Run:
    laptop.wait_for_dag(client, dag_id)
    client.unpause(dag_id)
    run = client.trigger(dag_id, conf)
    follow(client, run, said.append, check=laptop.check, timeout_s=300)
    return run


def assert_plausible(result: dict[str, Any]) -> None:
    metrics = result["metrics"]
    assert metrics["teacher_accuracy"] > 0.9
    assert metrics["distilled"]["accuracy_mean"] > metrics["alone"]["accuracy_mean"] + 0.03
    for way in (metrics["alone"], metrics["distilled"]):
        assert len(way["accuracies"]) == 3
        assert way["accuracy_spread"] > 0
        assert way["samples_per_s"] > 0


def assert_kept(client: AirflowClient, run: Run, result: dict[str, Any]) -> None:
    numbers = Path(client.xcom(run, "report"))
    assert json.loads(numbers.read_text()) == result
    table = numbers.with_suffix(".txt").read_text()
    for words in ("teacher", "student alone", "student distilled", "samples/s", *result["metrics"]["answered"]):
        assert words in table


def assert_nothing_runs(laptop: Laptop) -> None:
    async def look() -> tuple[list[Any], list[str]]:
        async with connect(laptop.redis.url) as redis:
            return await LocalBackend(laptop.work_dir).list(), await Directory(redis, "default").pools()

    assert asyncio.run(look()) == ([], [])


def student_log(laptop: Laptop, job: str) -> list[str]:
    async def read() -> list[str]:
        return [line.text async for line in LocalBackend(laptop.work_dir).logs(job)]

    return [line for line in asyncio.run(read()) if line.startswith(("alone", "distilled"))]
