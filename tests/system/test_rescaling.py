"""Rescaling in a real Airflow: the coming of a job starts it, a page shows it, and a person approves a shrink."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edl_airflow.laptop.client import AirflowClient, Run
from edl_airflow.laptop.launcher import Laptop
from edl_runtime.backends.local import LocalBackend

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

WITHIN_S = 150.0
"""How long anything may take on two busy cores."""

AT_ONCE_S = 45.0
"""How long it takes from a job's coming to another size of it, once Airflow listens."""

READ_S = 5.0
"""How long a question is read: Airflow may lose an answer within seconds of it, and the task then asks once more."""

Submit = Callable[[str], None]


@pytest.fixture
def submit(laptop: Laptop, client: AirflowClient) -> Iterator[Submit]:
    """Start a run that begins to train a job with one instance, once rescaling is switched on."""
    for dag_id in ("rescales", "submits"):
        laptop.wait_for_dag(client, dag_id)
        client.unpause(dag_id)
    runs: list[Run] = []
    yield lambda job: runs.append(client.trigger("submits", {"job": job}))
    client._ask("PATCH", "/api/v2/dags/rescales", json={"is_paused": True})
    for run in runs:
        client.fail(run)
    _until(laptop, lambda: not _sizes(laptop), "the jobs of failed runs go on")


def test_a_job_that_comes_is_given_room_and_gives_it_back_when_a_person_approves(
    laptop: Laptop, client: AirflowClient, submit: Submit
) -> None:
    """Nobody has triggered the first run; the second waits for an answer, and only then does the job shrink.

    Another job, once Airflow listens, is given room within seconds.
    """
    submit("first")
    _until(laptop, lambda: _sizes(laptop) == {"first": (3, 3)}, lambda: str(_sizes(laptop)))
    _until(laptop, lambda: client.runs("rescales", ["success"]), "no run has ended")
    first = client.runs("rescales", ["success"])[-1]
    assert first.run_id.startswith("asset_triggered")
    result = client.xcom(first, "rescale")
    assert [(one["name"], one["instances"], one["target"]) for one in result["targets"]] == [("first", 1, 3)]
    assert result["window"] == "always"
    page = _page(client, first)
    assert "window always" in page
    assert "grows from 1 to 3" in page
    assert client._http.get("/edl/rescaling/edl_default", headers={"Authorization": ""}).status_code == 401

    shrinks = client.trigger("rescales", {"cpus": 0.0015, "approve": True})
    question = _answered(laptop, client, shrinks)
    assert question["subject"] == "Shrink first from 3 to 1?"
    assert "| first | 3 | 1 | shrinks from 3 to 1" in question["body"]
    result = client.xcom(shrinks, "rescale")
    assert (result["waiting"], result["targets"][0]["target"]) == ([], 1)
    _until(laptop, lambda: _sizes(laptop) == {"first": (1, 1)}, lambda: str(_sizes(laptop)))
    assert "shrinks from 3 to 1" in _page(client, shrinks)
    log = "\n".join(client.log(shrinks, client.tasks(shrinks)[0]))
    assert "admin approves that these shrink: first to 1" in log

    submit("second")
    _until(laptop, lambda: "second" in _sizes(laptop), "the second job has not begun")
    began = time.monotonic()
    _until(laptop, lambda: _sizes(laptop)["second"][0] == 2, lambda: str(_sizes(laptop)))
    assert time.monotonic() - began < AT_ONCE_S
    assert _sizes(laptop)["first"][0] == 1  # it was resized just now, and rests


def _answered(laptop: Laptop, client: AirflowClient, run: Run) -> dict[str, Any]:
    """Approve whatever the run asks until it has ended; return the first question."""
    path = f"/api/v2/dags/{run.dag_id}/dagRuns/{run.run_id}/taskInstances/rescale/-1/hitlDetails"
    asked: list[dict[str, Any]] = []
    seen_at: dict[int, float] = {}

    def has_ended() -> bool:
        (task,) = client.tasks(run)
        if task.state == "awaiting_input":
            assert asked or _sizes(laptop) == {"first": (3, 3)}
            question = client._ask("GET", path)
            is_read = time.monotonic() - seen_at.setdefault(task.try_number, time.monotonic()) > READ_S
            if is_read and not question["response_received"]:
                asked.append(question)
                client._ask("PATCH", path, json={"chosen_options": ["Approve"], "params_input": {}})
        return client.state(run) in ("success", "failed")

    _until(laptop, has_ended, lambda: f"{client.tasks(run)}")
    assert client.state(run) == "success", client.tasks(run)
    return asked[0]


def _page(client: AirflowClient, run: Run) -> str:
    """Return the page that the task's link leads to."""
    url = client.links(run, "rescale")["Rescaling"]
    assert url
    answer = client._http.get(url)
    assert answer.status_code == 200
    return answer.text


def _sizes(laptop: Laptop) -> dict[str, tuple[int, int]]:
    """Return how many instances each job is asked to have, and how many run."""
    jobs = asyncio.run(LocalBackend(laptop.work_dir).list())
    return {job.name: (job.wanted, sum(one.phase == "running" for one in job.instances)) for job in jobs}


def _until(laptop: Laptop, condition: Callable[[], Any], otherwise: str | Callable[[], str]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        laptop.check()
        assert time.monotonic() < deadline, otherwise if isinstance(otherwise, str) else otherwise()
        time.sleep(0.5)
