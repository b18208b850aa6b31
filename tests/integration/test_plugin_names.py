"""What the page's API keeps from users: names of hidden jobs, hosts, the cluster's activity, and connections."""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from support.airflow.page import Api, Roles, overview, submit
from support.airflow.world import World
from support.network.proxy import running_proxy
from support.teachers.process import wait_until

from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.autoscale.policy.model import Node, Target, Workload
from edl_runtime.autoscale.rescale import rescale
from edl_runtime.autoscale.traffic.schema import to_windows
from edl_runtime.elastic.rendezvous.redis_store import Event
from edl_runtime.specs import Bounds
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect

with warnings.catch_warnings():  # of a test client that Airflow's own imports drag in
    warnings.simplefilter("ignore")
    from airflow.api_fastapi.auth.managers.models.resource_details import AccessView
    from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager

    from edl_airflow.plugin import viewers

GONE = "secret-train-0123456789"
ASKED = ("overview", "job?job=night", "pool?pool=answers", "timeline")


@pytest.fixture
def without_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but admins may see the cluster's activity."""

    def may(self: Any, *, access_view: AccessView, user: Any) -> bool:
        shown = access_view is not AccessView.CLUSTER_ACTIVITY or user.role == "admin"
        return shown and SimpleAuthManager.is_authorized_view(self, access_view=access_view, user=user)

    monkeypatch.setattr(Roles, "is_authorized_view", may, raising=False)


def blames(
    jobs: Sequence[Workload], nodes: Sequence[Node], capacity: Mapping[str, float], *, now_s: float, pause_s: float
) -> dict[str, Target]:
    """A policy that names others in its reasons."""
    del nodes, capacity, now_s, pause_s
    others = ", ".join(sorted(job.name for job in jobs))
    return {job.name: Target(instances=job.instances, reason=f"waits for others: {others}") for job in jobs}


def rescaled(world: World, job: str = "payrol") -> None:
    """Make a pass by a policy that blames others, in windows with a size for a pool that is not there."""
    sizes = {"sizes": {"pools": {job: 1}}}
    times = [("day", "00:00", "12:00"), ("night-time", "12:00", "24:00")]
    windows = [{"name": name, "start": start, "end": end, **sizes} for name, start, end in times]
    rules = RescalingRules(windows=to_windows({"windows": windows}))

    async def once() -> None:
        async with connect(world.redis_url) as client:
            await rescale(world.backend, client, world.namespace, rules, policy=blames)

    asyncio.run(once())


def happened(world: World, job: str, event: Event) -> None:
    """Let an agent have reported an event."""

    async def add() -> None:
        async with connect(world.redis_url) as client:
            await client.xadd(keys.group_events(world.namespace, job), {"event": msgspec.json.encode(event)})

    asyncio.run(add())


def started(world: World, api: Api) -> None:
    """Start a job and a pool that viewers see, and two pools that they don't, of which one is gone after a pass."""
    bounds = Bounds(1, 3)
    submit(world, "night", "nightly")
    submit(world, "answers", "nightly", kind="pool", bounds=bounds)
    submit(world, "payroll", "secret", kind="pool", bounds=bounds)
    submit(world, GONE, "secret", kind="pool", bounds=bounds)
    wait_until(lambda: set(world.jobs().values()) == {"running"})
    rescaled(world)
    asyncio.run(world.backend.delete(GONE))
    happened(world, "night", Event(kind="lost", instance=0, reason=f"payroll and {GONE} took its place"))
    wait_until(lambda: "night-time" in json.dumps(api.get("overview", "admin")))


def told(api: Api, role: str = "viewer") -> str:
    return "\n".join(json.dumps(api.get(what, role)) for what in ASKED)


def test_no_answer_names_a_hidden_job_there_or_gone(world: World, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a plan's reasons and notes and in events; who may change all jobs reads those texts."""
    started(world, api)
    assert [name for name in ("payrol", GONE) if name in told(api)] == []
    assert "night-time" in told(api), "windows are for who may see the cluster"
    monkeypatch.setattr(Roles, "readable", ("nightly", "secret", None))
    shown = told(api, "op")
    for text in (f"waits for others: answers, payroll, {GONE}", "is 'payroll' meant?", "took its place"):
        assert text in shown


@pytest.mark.usefixtures("without_cluster")
def test_the_timeline_of_who_may_not_see_the_cluster_is_of_their_jobs_alone(world: World, api: Api) -> None:
    """Without windows and traffic, which admins see."""
    started(world, api)
    ours, all_of_it = api.get("timeline"), api.get("timeline", "admin")
    assert {series["name"] for series in ours["series"]} == {"answers", "night"}
    assert (ours["windows"], ours["traffic"]) == ([], None)
    assert {window["name"] for window in all_of_it["windows"]} == {"day", "night-time"}
    assert "night-time" not in told(api)


@pytest.mark.usefixtures("without_cluster")
def test_what_is_away_is_told_without_hosts(world: World, api: Api) -> None:
    """In problems and in errors; who may see the cluster reads where it should be."""
    submit(world, "night", "nightly")
    url = urlsplit(world.redis_url)
    with running_proxy(url.hostname or "", url.port or 6379) as proxy:
        world.connect_to(world.redis_url.replace(f":{url.port}", f":{proxy.port}"))
        overview(api, "night")
        proxy.cut()
        wait_until(lambda: api.get("overview")["problems"])
        for what in ("overview", "job?job=night"):
            assert api.get(what)["problems"] == ["Redis can't be read now."]
            assert f"127.0.0.1:{proxy.port}" in str(api.get(what, "admin")["problems"])
        answers = {role: api.ask("/api/timeline", role) for role in ("viewer", "admin")}
        assert {answer.status_code for answer in answers.values()} == {503}
        assert answers["viewer"].json() == {"error": "Redis can't be read now."}
        assert f"127.0.0.1:{proxy.port}" in answers["admin"].json()["error"]


@pytest.mark.usefixtures("without_cluster")
def test_a_backend_that_is_away_is_told_in_time(world: World, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Kubernetes API that refuses connections, which its client tries for minutes."""
    cluster: dict[str, Any] = {"clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}]}
    cluster |= {"users": [{"name": "u", "user": {"token": "t"}}], "current-context": "c"}
    cluster |= {"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}
    given = {"conn_type": "kubernetes", "extra": {"kube_config": json.dumps(cluster)}}
    monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps(given))
    away = json.loads(os.environ["AIRFLOW_CONN_EDL_DEFAULT"])
    away["extra"] = {"namespace": world.namespace, "backend": "kubernetes", "kubernetes_conn_id": "cluster"}
    monkeypatch.setenv("AIRFLOW_CONN_EDL_DEFAULT", json.dumps(away))
    monkeypatch.setattr(viewers, "ANSWER_WITHIN_S", 1.0)
    answers = {role: api.ask("/api/overview", role) for role in ("viewer", "admin")}
    assert {answer.status_code for answer in answers.values()} == {503}
    assert answers["viewer"].json() == {"error": "The backend can't be reached now."}
    assert "The backend of edl_default has not answered within 1 s" in answers["admin"].json()["error"]


def test_a_connection_is_listed_for_who_may_read_it_or_sees_something_there(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others do not learn its id."""
    other = json.loads(os.environ["AIRFLOW_CONN_EDL_DEFAULT"])
    other["extra"]["work_dir"] = str(world.folder / "other")
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", json.dumps(other))
    monkeypatch.setattr(viewers, "LISTED_HOLDS_S", 0.0)
    submit(world, "night", "nightly")
    overview(api, "night")
    assert api.get("overview", "op")["conns"] == ["edl_default", "other"]
    assert api.get("overview")["conns"] == ["edl_default"]
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", os.environ["AIRFLOW_CONN_EDL_DEFAULT"])
    fresh = Api(api._manager)
    assert fresh.get("overview")["conns"] == ["edl_default", "other"]
    fresh.close()


@pytest.mark.usefixtures("world")
def test_a_file_that_is_none_is_not_found(api: Api) -> None:
    """Whatever its name is."""
    names = ("no.js", "%00", "edl.js%00", "%2e%2e%2fapp.py", "%ff", "x" * 5000)
    assert {api.ask(f"/static/{name}").status_code for name in names} == {404}
    assert api.ask("/static/edl.js").status_code == 200


@pytest.mark.usefixtures("world")
def test_a_browser_keeps_no_answer(api: Api) -> None:
    """Going back after a logout asks again, and is refused; files that are the same for everybody may be kept."""
    for path in ("/", "/api/overview", "/api/job?job=absent"):
        assert api.ask(path).headers["cache-control"] == "no-store"
    assert api.ask("/static/edl.js").headers["cache-control"] == "private, no-cache"
