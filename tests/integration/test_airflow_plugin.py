"""The plugin's pages, behind Airflow's own authentication, before a real backend and Redis."""

from __future__ import annotations

import asyncio
import html
import warnings
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.airflow.world import World, registered, until

from edl_airflow.links import Address
from edl_airflow.plugin import EdlPlugin, pages
from edl_runtime.backends.base import InstanceStatus, JobStatus
from edl_runtime.pool_reports import PoolDemand, StudentReport, TeacherReport
from edl_runtime.progress import Progress, publish
from edl_runtime.registry.members import Member
from edl_runtime.specs import Bounds, JobSpec
from edl_runtime.store.client import connect

with warnings.catch_warnings():  # of a test client that Airflow's own imports drag in
    warnings.simplefilter("ignore")
    from airflow.api_fastapi import app as airflow_app
    from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from airflow.models.revoked_token import RevokedToken


@pytest.fixture
def world(tmp_path: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> World:
    """One with a job that has written a line a browser must not take for a script."""
    world = World(tmp_path, redis_url, namespace, monkeypatch)
    words = ("python", "-c", "print('<script>alert(1)</script>')")
    spec = JobSpec(name="student", kind="trainer", command=words, bounds=Bounds(1, 1), instances=1)
    asyncio.run(world.backend.submit(spec, token="try-1", secrets={}))
    until(lambda: world.jobs()["student"] == "succeeded")
    return world


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    """What a viewer gets by logging in."""
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "s" * 64)
    monkeypatch.setattr(RevokedToken, "is_revoked", lambda _: False)  # would ask a database
    manager = SimpleAuthManager()  # type: ignore[no-untyped-call]
    monkeypatch.setattr(airflow_app._AuthManagerState, "instance", manager)
    return manager.generate_jwt(SimpleAuthManagerUser(username="viewer", role="viewer"))


def _get(path: str, token: str = "") -> httpx.Response:
    (mounted,) = EdlPlugin.fastapi_apps

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=mounted["app"]), base_url="http://airflow.example"
        ) as client:
            return await client.get(path, headers={"Authorization": f"Bearer {token}"} if token else {})

    return asyncio.run(get())


@pytest.mark.parametrize(
    "path",
    [
        "/jobs/edl_default/student",
        "/jobs/edl_default/student/log",
        "/pools/edl_default/digits",
        "/pools/unknown/digits",
        "/openapi.json",
    ],
)
def test_nobody_sees_a_page_without_logging_in(world: World, path: str) -> None:  # noqa: ARG001
    """Neither a page, nor whether there is something behind it."""
    assert _get(path).status_code in {401, 404}
    assert "openapi" in path or _get(path).status_code == 401


def test_the_log_page_shows_the_log_and_runs_nothing(world: World, token: str) -> None:
    """Everything is escaped, and the page may load nothing."""
    page = _get("/jobs/edl_default/student/log", token)
    assert page.status_code == 200
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page.text
    assert "<script>" not in page.text
    assert "succeeded" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    asyncio.run(world.backend.delete("student"))
    assert "alert(1)" in _get("/jobs/edl_default/student/log", token).text, "logs outlive their job"


def test_the_log_page_shows_how_far_the_job_is_and_who_is_the_limit(world: World, token: str) -> None:
    """As the student reported last."""

    async def report() -> None:
        report = Progress(step=7, updated_at=1.0, limit="student", busy=0.2)
        async with connect(world.redis_url) as client:
            await publish(client, world.namespace, "student", report)

    asyncio.run(report())
    page = html.unescape(_get("/jobs/edl_default/student/log", token).text)
    assert "step 7 · 0 samples/s" in page
    assert "the student is the limit: teachers are idle 80 % of the time" in page


def test_the_job_page_shows_the_instances(world: World, token: str) -> None:
    """With a link to the log of each, which shows that one alone."""
    page = _get("/jobs/edl_default/student", token)
    assert page.status_code == 200
    assert "succeeded" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert 'href="/edl/jobs/edl_default/student/log?instance=0"' in page.text
    assert "alert(1)" in _get("/jobs/edl_default/student/log?instance=0", token).text
    other = _get("/jobs/edl_default/student/log?instance=1", token)
    assert (other.status_code, "alert(1)" in other.text) == (200, False)
    assert 'href="/edl/jobs/edl_default/student"' in other.text
    assert _get("/jobs/edl_default/student/log?instance=-1", token).status_code == 422
    asyncio.run(world.backend.delete("student"))
    assert "ended and removed" in _get("/jobs/edl_default/student", token).text


PENDING = InstanceStatus(
    index=1, phase="pending", started_at=1.0, pod="night-1-abc", disruptions=2, reason="<b>no place</b>"
)
RUNS = InstanceStatus(index=0, phase="running", started_at=1.0, pod="night-0-xyz", node="gpu-7", restarts=3)


def _page(*instances: InstanceStatus, members: tuple[int, ...] = (), **changes: Any) -> str:
    given: dict[str, Any] = {"name": "night", "kind": "trainer", "phase": "running", "token": "", "digest": ""}
    given |= {"wanted": 2, "created_at": 1.0, "reason": "no place", "instances": instances}
    return pages.job_page(Address("edl_default", "night"), JobStatus(**{**given, **changes}), None, members)


def test_the_job_page_shows_which_pods_there_are_and_what_they_wait_for() -> None:
    """And where they run, their rank, and how often the cluster has ended them."""
    page = _page(RUNS, PENDING, members=(0,), most_disruptions=20)
    for part in (
        "night-0-xyz",
        "gpu-7",
        "night-1-abc",
        "&lt;b&gt;no place&lt;/b&gt;",
        "2 of at most 20",
        "rank",
        "pending",
    ):
        assert part in page
    assert "<b>no place" not in page
    assert 'http-equiv="refresh"' in page
    assert 'http-equiv="refresh"' not in _page(RUNS, phase="failed")


def test_the_job_page_of_processes_has_no_columns_for_pods() -> None:
    """Nor one for ranks where nobody trains together."""
    page = _page(InstanceStatus(index=0, phase="running", started_at=1.0))
    assert all(word not in page for word in ("<th>pod", "<th>node", "<th>rank", "ended by the cluster"))
    assert "none yet" in _page()


def test_the_pool_page_shows_its_pods() -> None:
    """As a job's page does its own."""
    pool = JobStatus(
        name="digits", kind="pool", phase="running", token="", digest="", wanted=2, created_at=1.0,
        instances=(RUNS, PENDING),
    )  # fmt: skip
    page = pages.pool_page(Address("edl_default", "digits"), pool, [], [], PoolDemand(), trouble="")
    for part in ("night-0-xyz", "gpu-7", "no place", 'href="/edl/jobs/edl_default/digits/log?instance=1"'):
        assert part in page
    log = pages.log_page(Address("edl_default", "digits"), pool, None, [], 1)
    assert 'href="/edl/pools/edl_default/digits"' in log


def test_the_pool_page_shows_who_is_busy_and_who_waits() -> None:
    """Of those that say."""
    said = PoolDemand(
        teachers={"t0": TeacherReport(busy=0.754, over_s=10.0), "t1": None},
        students={"s0": StudentReport(waiting=0.25, samples_per_s=81.4)},
    )
    teachers = [Member(id="t0", address="h:1"), Member(id="t1", address="h:2")]
    page = pages.pool_page(Address("c", "p"), None, teachers, [Member(id="s0", address="h:3")], said, trouble="")
    for part in ("<td>75 %</td><td>t0</td>", "<td></td><td>t1</td>", "<td>25 %</td>", "<td>81</td>"):
        assert part in page


def test_the_pool_page_shows_who_is_registered(world: World, token: str) -> None:
    """Also for a pool that the backend does not run."""
    with registered(world, "digits", "127.0.0.1:4711"):
        page = _get("/pools/edl_default/digits", token)
    assert page.status_code == 200
    assert "127.0.0.1:4711" in page.text


def test_the_pool_page_says_that_redis_is_away(world: World, token: str) -> None:
    """Without its password."""
    world.connect_to("redis://:top-secret@127.0.0.1:1/0")
    page = _get("/pools/edl_default/digits", token)
    assert page.status_code == 200
    assert "Redis at 127.0.0.1:1 can't be used" in html.unescape(page.text)
    assert "top-secret" not in page.text


@pytest.mark.parametrize(
    "path", ["/jobs/edl_default/nobody", "/jobs/edl_default/nobody/log", "/jobs/elsewhere/student/log"]
)
def test_what_is_not_there_is_not_found(world: World, token: str, path: str) -> None:  # noqa: ARG001
    """A job or a connection that nobody knows."""
    assert _get(path, token).status_code == 404


def test_other_connections_are_not_told_from_none(world: World, token: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """A viewer learns neither that there is one nor what leads to it."""
    monkeypatch.setenv("AIRFLOW_CONN_BILLING", "postgres://billing.example/prices")
    other, none = _get("/jobs/billing/student/log", token), _get("/jobs/nobody/student/log", token)
    assert other.status_code == none.status_code == 404
    assert other.text == none.text
    assert "postgres" not in other.text
