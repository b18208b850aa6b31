"""The plugin's pages, behind Airflow's own authentication, before a real backend and Redis."""

from __future__ import annotations

import asyncio
import html
import warnings
from pathlib import Path

import httpx
import pytest
from support.airflow.world import World, registered, until

from edl_airflow.plugin import EdlPlugin
from edl_runtime.progress import Progress, publish
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


@pytest.mark.usefixtures("world")
def test_nobody_sees_a_page_without_logging_in() -> None:
    """Neither a page, nor whether there is something behind it."""
    pages = ("jobs/edl_default/student", "jobs/edl_default/student/log", "pools/edl_default/digits", "pools/no/digits")
    assert [_get(f"/{page}").status_code for page in pages] == [401] * 4
    assert _get("/openapi.json").status_code == 404


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


@pytest.mark.usefixtures("world")
def test_what_is_not_there_is_not_found(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A viewer learns neither that there is another connection nor what leads to it."""
    monkeypatch.setenv("AIRFLOW_CONN_BILLING", "postgres://billing.example/prices")
    for page in ("jobs/edl_default/nobody", "jobs/edl_default/nobody/log"):
        assert _get(f"/{page}", token).status_code == 404
    other, none = _get("/jobs/billing/student/log", token), _get("/jobs/nobody/student/log", token)
    assert other.status_code == none.status_code == 404
    assert other.text == none.text
    assert "postgres" not in other.text
