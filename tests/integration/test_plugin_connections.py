"""Connections that are edited, and parts of a snapshot that fail: the page goes on."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from support.airflow.page import Api, add_task, overview, report, submit
from support.airflow.world import World
from support.teachers.process import wait_until

from edl_airflow.plugin import clients, viewers
from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.autoscale.rescale import rescale
from edl_runtime.autoscale.traffic.schema import to_windows
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.store.redis_client import connect


def edit(monkeypatch: pytest.MonkeyPatch, **extra: str) -> None:
    given = json.loads(os.environ["AIRFLOW_CONN_EDL_DEFAULT"])
    given["extra"].update(extra)
    monkeypatch.setenv("AIRFLOW_CONN_EDL_DEFAULT", json.dumps(given))


@pytest.fixture(autouse=True)
def noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "LOOKUP_HOLDS_S", 0.0)


def test_an_edited_connection_is_that_of_the_next_answer(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another Redis namespace, and of another folder: nothing of what was read before is shown."""
    submit(world, "night", "nightly", words=("python", "-c", "print('of before'); import time; time.sleep(600)"))
    report(world, "night", total_steps=14, loss=0.5)
    overview(api, '"share": 0.5')
    wait_until(lambda: "of before" in api.ask("/api/log?job=night").text)
    cursor = api.get("log?job=night")["cursor"]
    assert api.get("job?job=night")["curve"]
    assert [series["name"] for series in api.get("timeline")["series"]] == ["night"]

    edit(monkeypatch, namespace=f"{world.namespace}-other")
    (job,) = api.get("overview")["jobs"]
    assert (job["name"], job["progress"]) == ("night", None)
    assert api.get("job?job=night")["curve"] == []

    (world.folder / "other").mkdir()
    other = World(world.folder / "other", world.redis_url, f"{world.namespace}-other", monkeypatch)
    submit(other, "night", "nightly", words=("python", "-c", "print('of now'); import time; time.sleep(600)"))
    try:
        wait_until(lambda: [one.phase for one in asyncio.run(other.backend.get("night")).instances] == ["running"])
        monkeypatch.setattr(viewers, "CONNECTIONS_HOLD_S", 0.0)
        assert [job["running"] for job in api.get("overview")["jobs"]] == [1]
        wait_until(lambda: "of now" in api.ask("/api/log?job=night").text)
        part = api.get(f"log?job=night&cursor={cursor}")
        assert (part["reset"], [line["text"] for line in part["lines"]]) == (True, ["of now"])
        assert api.ask("/api/log/download?job=night").text == "[0] of now\n"
        edit(monkeypatch, work_dir=str(world.folder / "empty"))
        assert api.get("overview")["jobs"] == []
        assert api.ask("/api/log?job=night").status_code == 403
    finally:
        asyncio.run(other.backend.delete("night"))


def test_requests_share_one_client(world: World, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is opened once for all that a page asks, and closed when nobody asks."""
    opened: list[str] = []
    open_client = clients.open_client

    def counted(connection: Any) -> Any:
        opened.append(connection.namespace)
        return open_client(connection)

    monkeypatch.setattr(clients, "open_client", counted)
    submit(world, "night", "nightly")
    overview(api, '"running": 1')
    for path in ("job?job=night", "log?job=night", "timeline", "log/download?job=night"):
        assert api.ask(f"/api/{path}").status_code == 200
    assert opened == [world.namespace]


@pytest.mark.parametrize("part", ["tasks_of_tries", "expected_plans", "take_cluster_snapshot"])
def test_the_page_goes_on_without_an_optional_part(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Whatever goes wrong there, as in Airflow's database: it is said, and nothing more is once all is well again."""
    add_task()
    submit(world, "night", "nightly")
    rescaled(world)

    def fails(*_: object, **__: object) -> Any:
        raise ValueError("an error that nobody has thought of")

    with monkeypatch.context() as broken:
        broken.setattr(f"edl_airflow.plugin.live.{part}", fails)
        seen = overview(api, "can't be read now (ValueError")
        assert [job["name"] for job in seen["jobs"]] == ["night"]
    overview(api, '"run_id": "manual__1"')
    wait_until(lambda: not api.get("overview")["problems"])


def test_a_reader_survives_what_nobody_has_thought_of(world: World, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page shows what was known, and why."""
    submit(world, "night", "nightly")
    overview(api, '"running": 1')

    async def fails(_: object) -> Any:
        raise ValueError("an error that nobody has thought of")

    with monkeypatch.context() as broken:
        broken.setattr(LocalBackend, "list", fails)
        seen = overview(api, "nobody has thought of")
        assert [job["name"] for job in seen["jobs"]] == ["night"]
    wait_until(lambda: not api.get("overview")["problems"])


def rescaled(world: World) -> None:
    """Make a pass by traffic windows, so that there are next ones."""
    halves = [("day", "00:00", "12:00"), ("night", "12:00", "24:00")]
    sizes = {"pools": {"answers": 1}}
    windows = [{"name": name, "start": start, "end": end, "sizes": sizes} for name, start, end in halves]
    rules = RescalingRules(windows=to_windows({"windows": windows}))

    async def once() -> None:
        async with connect(world.redis_url) as client:
            await rescale(world.backend, client, world.namespace, rules)

    asyncio.run(once())
