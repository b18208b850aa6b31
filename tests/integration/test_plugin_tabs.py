"""The page's tab on task instances and runs of Airflow."""

from __future__ import annotations

import asyncio
import os

import pytest
from support.airflow.page import Api, add_link, add_task, submit
from support.airflow.world import World
from support.teachers.process import wait_until

from edl_airflow.plugin import viewers
from edl_airflow.plugin.clients import Clients
from edl_airflow.plugin.live import LiveReader


def test_a_tab_shows_the_jobs_of_its_task_or_run(world: World, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the task is deferred, too, in the connection of its links; a task without them makes nobody read any."""
    read: list[str] = []

    class Recorded(LiveReader):
        def __init__(self, conn_id: str, clients: Clients) -> None:
            super().__init__(conn_id, clients)
            read.append(conn_id)

    monkeypatch.setattr(viewers, "LiveReader", Recorded)
    monkeypatch.setattr(viewers.access, "readable_connections", lambda _, conns: set(conns))  # else others are tried
    add_task()
    submit(world, "night", "nightly")
    submit(world, "other")
    monkeypatch.setenv("AIRFLOW_CONN_NIGHTS", os.environ["AIRFLOW_CONN_EDL_DEFAULT"])
    task = "overview?dag_id=nightly&run_id=manual__1&task_id=train&map_index={MAP_INDEX}"
    seen = api.get(task)
    assert (seen["conn"], seen["jobs"], seen["scope"]["task"], read) == ("", [], "deferred", [])

    asked = ("job?job=night", "pool?pool=night", "timeline?job=night", "log?job=night", "log/download?job=night")
    answers = [api.ask(f"/api/{each}&dag_id=nightly&run_id=manual__1&task_id=train") for each in asked]
    assert {answer.status_code for answer in answers} <= {403, 404}

    add_link("/airflow/edl/?conn=nights&job=night")
    for where in (task, "overview?dag_id=nightly&run_id=manual__1"):
        seen = api.get(where)
        assert (seen["conn"], [job["name"] for job in seen["jobs"]]) == ("nights", ["night"])
        assert seen["scope"]["task"] == ("deferred" if where == task else "")
    for other in ("&task_id=train&map_index=3", "&task_id=none"):
        assert api.get(f"overview?dag_id=nightly&run_id=manual__1{other}")["jobs"] == []
    assert api.ask("/api/overview?dag_id=secret&run_id=manual__1&task_id=none").status_code == 403
    assert set(read) == {"nights"}


def test_the_tab_of_an_ended_task_shows_the_job_that_was_removed(world: World, api: Api) -> None:
    """By the task's link, once there has been such a job; a run's tab offers it, and names its other connections."""
    run = "overview?dag_id=nightly&run_id=manual__1"
    add_task(state="failed")
    submit(world, "night", "nightly")
    submit(world, "other")
    add_link("/edl/?conn=edl_default&job=night")
    add_link("/edl/?conn=elsewhere&pool=never", key="_link_TeacherPoolLink")
    assert api.get(run)["removed"] == []
    for name in ("night", "other"):
        asyncio.run(world.backend.delete(name))
    wait_until(lambda: api.get(run)["jobs"] == [])
    for where in (run, f"{run}&task_id=train"):
        seen = api.get(where)
        assert (seen["removed"], seen["other_conns"]) == (["night"], ["elsewhere"])
    assert api.get(f"job?job=night{run.partition('overview')[2].replace('?', '&')}")["job"] is None


def test_a_link_to_a_job_of_another_owner_offers_nothing(world: World, api: Api) -> None:
    """As that of a task which has not started its job, by a name that another has had."""
    add_task(state="failed")
    submit(world, "mine-no-more")
    add_link("/edl/?conn=edl_default&job=mine-no-more")
    asyncio.run(world.backend.delete("mine-no-more"))
    assert api.get("overview?dag_id=nightly&run_id=manual__1&task_id=train")["removed"] == []
