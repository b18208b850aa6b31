"""What a real Airflow shows of its tasks' pods: why they wait, why they failed, and how often they were ended."""

from __future__ import annotations

import asyncio
import html

import pytest
from laptop.client import DagRun, TaskInstance
from support.airflow.shared import Airflow, beside_others
from support.cluster.pod_faults import evict, pods_of

pytestmark = [pytest.mark.kubernetes, pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

OVER = ("success", "failed")


@beside_others
def test_a_task_that_waits_for_gpus_shows_which_pods_do(airflow: Airflow) -> None:
    """Its links lead there while it is deferred; whoever ends it leaves nothing."""
    run = airflow.begin("waits")
    airflow.until(lambda: all(task.state == "deferred" for task in _tasks(airflow, run).values()))
    for task_id, link, job in (("train", "Trainers", "waits"), ("pool", "Teacher pool", "waiting-pool")):
        page = airflow.until(
            lambda task_id=task_id, link=link: (
                "can't be scheduled" in (shown := _page(airflow, run, task_id, link)) and shown
            )
        )
        (pod,) = asyncio.run(pods_of(airflow.pods.cluster, job))
        assert f"<td>{pod}</td>" in page
        assert '<td class="pending">pending</td>' in page
        assert "Insufficient nvidia.com/gpu" in page
        assert f'/edl/jobs/edl_near/{job}/log?instance=0"' in page
        assert "no output yet" in _fetched(airflow, f"/edl/jobs/edl_near/{job}/log?instance=0")
    assert all(task.state == "deferred" for task in _tasks(airflow, run).values())
    airflow.client.fail(run)
    airflow.nothing_is_left("waits", "waiting-pool", place=airflow.pods)


@beside_others
def test_the_users_mistakes_fail_in_their_first_try(airflow: Airflow) -> None:
    """Though there are two retries; the container's last lines are in the log."""
    run = airflow.begin("mistaken")
    airflow.until(lambda: airflow.client.state(run) in OVER)
    tasks = _tasks(airflow, run)
    assert {(task.state, task.try_number) for task in tasks.values()} == {("failed", 1)}
    script, image = ("\n".join(airflow.client.log(run, tasks[task_id])) for task_id in ("script", "image"))
    _, last_lines = script.split("its last lines:")
    assert "no such data set" in last_lines
    assert "InvalidImageName" in image
    airflow.nothing_is_left("mistaken", place=airflow.pods)


@beside_others
def test_evictions_are_counted_in_the_log_and_have_a_limit(airflow: Airflow) -> None:
    """Each is one line; one more than is allowed is the end of the task, and of its pods."""
    cluster = airflow.pods.cluster
    run = airflow.begin("evicted")

    def is_up(other_than: str = "") -> list[str]:
        pods = asyncio.run(pods_of(cluster, "evicted"))
        is_new = bool(pods) and other_than not in pods
        return pods if is_new and '<td class="running">' in _fetched(airflow, "/edl/jobs/edl_near/evicted") else []

    (first,) = airflow.until(is_up)
    assert asyncio.run(evict(cluster, first))
    (second,) = airflow.until(lambda: is_up(first))
    assert "<td>1 of at most 1</td>" in _page(airflow, run, "train", "Trainers")
    ended = "'evicted': instance 0 was ended by the cluster (Eviction API: evicting) and is replaced: 1 of at most 1"
    airflow.until(lambda: ended in airflow.client.log(run, _tasks(airflow, run)["train"]))
    assert asyncio.run(evict(cluster, second))
    airflow.until(lambda: airflow.client.state(run) in OVER)
    task = _tasks(airflow, run)["train"]
    log = airflow.client.log(run, task)
    assert [line for line in log if "of at most" in line] == [ended]
    reason = "instance 0 was evicted, preempted or lost with its node 2 times, and pod.disruptions is 1"
    assert f"{reason}; the last time: Eviction API: evicting" in "\n".join(log)
    assert task.state == "failed"
    airflow.nothing_is_left("evicted", place=airflow.pods)


def _tasks(airflow: Airflow, run: DagRun) -> dict[str, TaskInstance]:
    return {task.task_id: task for task in airflow.client.tasks(run)}


def _page(airflow: Airflow, run: DagRun, task_id: str, link: str) -> str:
    """Return the page that a link of the task leads to, as a logged-in browser gets it; empty before there is one."""
    url = airflow.client.links(run, task_id)[link]
    return _fetched(airflow, url) if url else ""


def _fetched(airflow: Airflow, path: str) -> str:
    answer = airflow.client._http.get(path)
    assert answer.status_code == 200, answer.text
    return html.unescape(answer.text)
