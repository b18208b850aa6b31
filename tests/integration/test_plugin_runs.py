"""Names of jobs that another owner takes over: the page shows nothing of the former one."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec
import pytest
from support.airflow.page import Api, Roles, overview, report, submit
from support.airflow.world import World
from support.teachers.process import wait_until

from edl_airflow.identity import job_name
from edl_airflow.plugin import past
from edl_airflow.plugin.airflow_state import TaskKey
from edl_runtime.autoscale import history
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect

BOTH = ("nightly", "secret", None)


def says(text: str) -> tuple[str, ...]:
    return ("python", "-c", f"import time; print({text!r}, flush=True); time.sleep(600)")


def failed(world: World, job: str, reason: str) -> None:
    """Add an event as that of a job's agents."""

    async def add() -> None:
        event = msgspec.json.encode({"kind": "failed", "instance": 0, "reason": reason})
        async with connect(world.redis_url) as client:
            await client.xadd(keys.group_events(world.namespace, job), {"event": event})

    asyncio.run(add())


def trained(world: World, api: Api, name: str, dag: str, loss: float) -> float:
    """Let a job of a DAG run until it was seen with a curve, an event and a log; return when it was made."""
    submit(world, name, dag, words=says(f"the log of {dag}"), elastic=True)
    began = asyncio.run(world.backend.get(name)).created_at
    overview(api, f'"{name}"')
    overview(api, '"running": 1')
    report(world, name, step=round(1 / loss), loss=loss, updated_at=time.time())
    failed(world, name, f"the failure of {dag}")
    wait_until(lambda: f"the log of {dag}" in json.dumps(api.get(f"log?job={name}")))
    return began


def removed(world: World, api: Api, name: str) -> None:
    asyncio.run(world.backend.delete(name))
    wait_until(lambda: name not in json.dumps(api.get("overview")["jobs"]))


def shown(api: Api, name: str, cursor: str = "") -> dict[str, Any]:
    """All that the page shows of a job, by the name of the question."""
    asked = {"job": "job", "log": f"log?cursor={cursor}", "timeline": "timeline"}
    return {what: api.get(f"{path}{'&' if '?' in path else '?'}job={name}") for what, path in asked.items()}


def losses(found: dict[str, Any]) -> list[float]:
    return [point["loss"] for point in found["job"]["curve"]]


@pytest.fixture(autouse=True)
def always_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "READ_EVERY_S", 0.0)
    monkeypatch.setattr(history, "TWO_WITHIN_MS", 0)  # else of a short run the last point alone is kept
    monkeypatch.setattr(Roles, "readable", BOTH)


def test_a_name_taken_over_shows_nothing_of_its_former_owner(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its log, also to a reader who goes on, nor its curve, events, timeline and marks."""
    trained(world, api, "night", "secret", loss=0.5)
    cursor = api.get("log?job=night")["cursor"]
    removed(world, api, "night")
    began = trained(world, api, "night", "nightly", loss=0.25)
    monkeypatch.setattr(Roles, "readable", ("nightly", None))
    found = shown(api, "night", cursor)
    assert "secret" not in json.dumps(found)
    assert [line["text"] for line in found["log"]["lines"]] == ["the log of nightly"]
    assert found["log"]["reset"]
    assert losses(found) == [0.25]
    assert [event["kind"] for event in found["job"]["events"]] == ["failed"]
    (series,) = found["timeline"]["series"]
    assert series["points"][0][0] >= began
    assert [mark["text"] for mark in found["timeline"]["marks"]] == ["instance 0: the failure of nightly"]


def test_a_removed_job_shows_its_last_owner_s_run_alone(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And shows it to nobody who could see the owner before; the owner was asked for when that one was removed, too."""
    trained(world, api, "night", "secret", loss=0.5)
    removed(world, api, "night")
    before = shown(api, "night")
    assert (losses(before), [event["kind"] for event in before["job"]["events"]]) == ([0.5], ["failed"])
    began = trained(world, api, "night", "nightly", loss=0.25)
    removed(world, api, "night")
    monkeypatch.setattr(Roles, "readable", ("nightly", None))
    found = shown(api, "night")
    assert losses(found) == [0.25]
    assert "secret" not in json.dumps(found)
    assert [line["text"] for line in found["log"]["lines"]] == ["the log of nightly"]
    (series,) = found["timeline"]["series"]
    assert series["points"][0][0] >= began
    assert [mark["text"] for mark in found["timeline"]["marks"]] == ["instance 0: the failure of nightly"]
    monkeypatch.setattr(Roles, "readable", ("secret", None))
    assert api.get("timeline")["series"] == []
    assert {api.ask(f"/api/{what}?job=night").status_code for what in ("job", "log", "log/download")} == {403}


def test_a_retry_goes_on_with_the_curve_of_the_try_before(world: World, api: Api) -> None:
    """Its name is its task instance's own, so what is kept by it was never another owner's."""
    name = job_name(TaskKey(dag_id="nightly", run_id="manual__1", task_id="train"))
    trained(world, api, name, "nightly", loss=0.5)
    removed(world, api, name)
    trained(world, api, name, "nightly", loss=0.25)
    assert losses(shown(api, name)) == [0.5, 0.25]
