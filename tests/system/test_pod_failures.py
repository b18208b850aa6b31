"""What a real Airflow shows of its tasks' pods: why they wait, why they failed, and how often they were evicted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from laptop.client import DagRun, TaskInstance
from support.airflow.shared import Airflow, in_parallel
from support.cluster.pod_faults import evict, pods_of

pytestmark = [pytest.mark.kubernetes, pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

OVER = ("success", "failed")


@in_parallel
def test_the_pages_of_a_waiting_task_name_its_pending_pods(airflow: Airflow) -> None:
    """Its links work while it is deferred; ending it deletes the pods."""
    run = airflow.begin("waits")
    airflow.wait_until(lambda: all(task.state == "deferred" for task in _tasks(airflow, run).values()))
    for task_id, link, job in (("train", "Trainers", "waits"), ("pool", "Teacher pool", "waiting-pool")):
        (instance,) = airflow.wait_until(
            lambda job=job: "can't be scheduled" in str(found := _fetched(airflow, "job", job)) and found["instances"]
        )
        (pod,) = asyncio.run(pods_of(airflow.pods.cluster, job))
        assert (instance["pod"], instance["phase"]) == (pod, "pending")
        assert "Insufficient nvidia.com/gpu" in instance["reason"]
        assert job in (airflow.client.links(run, task_id)[link] or "")
        assert _fetched(airflow, "log", job)["lines"] == []
    assert all(task.state == "deferred" for task in _tasks(airflow, run).values())
    airflow.client.fail(run)
    airflow.wait_until_nothing_remains("waits", "waiting-pool", host=airflow.pods)


@in_parallel
def test_mistakes_of_the_user_fail_in_the_first_try(airflow: Airflow) -> None:
    """In spite of two retries; the container's last lines are in the log."""
    run = airflow.begin("mistaken")
    airflow.wait_until(lambda: airflow.client.state(run) in OVER)
    tasks = _tasks(airflow, run)
    assert {(task.state, task.try_number) for task in tasks.values()} == {("failed", 1)}
    script, image = ("\n".join(airflow.client.log(run, tasks[task_id])) for task_id in ("script", "image"))
    _, last_lines = script.split("its last lines:")
    assert "no such data set" in last_lines
    assert "InvalidImageName" in image
    airflow.wait_until_nothing_remains("mistaken", host=airflow.pods)


@in_parallel
def test_evictions_are_logged_and_limited(airflow: Airflow) -> None:
    """Each is one line; one more than allowed fails the task and deletes its pods."""
    cluster = airflow.pods.cluster
    run = airflow.begin("evicted")

    def is_up(other_than: str = "") -> list[str]:
        pods = asyncio.run(pods_of(cluster, "evicted"))
        is_new = bool(pods) and other_than not in pods
        if not is_new:
            return []
        instances = _fetched(airflow, "job", "evicted")["instances"]
        return pods if any(one["phase"] == "running" and one["pod"] in pods for one in instances) else []

    (first,) = airflow.wait_until(is_up)
    assert asyncio.run(evict(cluster, first))
    (second,) = airflow.wait_until(lambda: is_up(first))
    airflow.wait_until(lambda: _fetched(airflow, "job", "evicted")["instances"][0]["disruptions"] == 1)
    ended = "'evicted': instance 0 was ended by the cluster (Eviction API: evicting) and is replaced: 1 of at most 1"
    airflow.wait_until(lambda: ended in airflow.client.log(run, _tasks(airflow, run)["train"]))
    assert asyncio.run(evict(cluster, second))
    airflow.wait_until(lambda: airflow.client.state(run) in OVER)
    task = _tasks(airflow, run)["train"]
    log = airflow.client.log(run, task)
    assert [line for line in log if "of at most" in line] == [ended]
    reason = "instance 0 was evicted, preempted or lost with its node 2 times, and pod.disruptions is 1"
    assert f"{reason}; the last time: Eviction API: evicting" in "\n".join(log)
    assert task.state == "failed"
    airflow.wait_until_nothing_remains("evicted", host=airflow.pods)


def _tasks(airflow: Airflow, run: DagRun) -> dict[str, TaskInstance]:
    return {task.task_id: task for task in airflow.client.tasks(run)}


def _fetched(airflow: Airflow, what: str, job: str) -> dict[str, Any]:
    """Return what the plugin's page shows of a job on pods: itself ("job"), or its log."""
    return airflow.shown(what, conn="edl_near", job=job)
