"""The plugin's pages, behind Airflow's own authentication, before a real backend and Redis."""

from __future__ import annotations

import asyncio
import html
import threading
import warnings
from collections.abc import Container
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.airflow.world import World, registered
from support.teachers.process import wait_until

from edl_airflow.plugin import EdlPlugin, pages
from edl_runtime.progress import Progress, publish_progress
from edl_runtime.specs import Bounds, JobSpec
from edl_runtime.store.redis_client import connect

with warnings.catch_warnings():  # of a test client that Airflow's own imports drag in
    warnings.simplefilter("ignore")
    from airflow.api_fastapi import app as airflow_app
    from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
    from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from airflow.models.dag import DagModel
    from airflow.models.revoked_token import RevokedToken


class Roles(SimpleAuthManager):
    """Viewers may read all DAGs but one; `readable` narrows that to those named, of which `hidden` may not be read."""

    readable: Container[str | None] = ("nightly", None)
    hidden: Container[DagAccessEntity | None] = ()

    def is_authorized_dag(self, *, access_entity: Any = None, details: Any = None, **given: Any) -> bool:
        asked = details.id if details else None
        may = asked in self.readable and access_entity not in self.hidden
        return may and super().is_authorized_dag(access_entity=access_entity, details=details, **given)


@pytest.fixture
def world(tmp_path: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> World:
    """One with a job that has written a line a browser must not take for a script."""
    world = World(tmp_path, redis_url, namespace, monkeypatch)
    words = ("python", "-c", "print('<script>alert(1)</script>')")
    spec = JobSpec(name="student", kind="trainer", command=words, bounds=Bounds(1, 1), instances=1)
    asyncio.run(world.backend.submit(spec, token="try-1", secrets={}))
    wait_until(lambda: world.jobs()["student"] == "succeeded")
    return world


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    """What a viewer gets by logging in."""
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "s" * 64)
    monkeypatch.setattr(RevokedToken, "is_revoked", lambda _: False)  # would ask a database
    monkeypatch.setattr(DagModel, "get_team_name", lambda _: None)  # the same
    manager = Roles()  # type: ignore[no-untyped-call]
    monkeypatch.setattr(airflow_app._AuthManagerState, "instance", manager)
    return manager.generate_jwt(SimpleAuthManagerUser(username="viewer", role="viewer"))


def _get(path: str, token: str = "", method: str = "GET") -> httpx.Response:
    (mounted,) = EdlPlugin.fastapi_apps

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=mounted["app"]), base_url="http://airflow.example"
        ) as client:
            return await client.request(method, path, headers={"Authorization": f"Bearer {token}"} if token else {})

    return asyncio.run(get())


@pytest.mark.usefixtures("world")
def test_nobody_sees_a_page_without_logging_in() -> None:
    """Neither a page, nor whether there is something behind it, whatever is asked for in which way."""
    pages = ("jobs/edl_default/student", "jobs/edl_default/student/log", "pools/edl_default/digits", "pools/no/digits")
    others = ("openapi.json", "", "jobs/edl_default/student/", "jobs/edl_default/student/log?tail=none")
    assert [_get(f"/{page}").status_code for page in (*pages, *others)] == [401] * 8
    assert _get("/jobs/edl_default/student", method="POST").status_code == 401


@pytest.mark.usefixtures("world")
def test_a_token_that_is_none_opens_nothing(token: str) -> None:
    """As no token at all."""
    assert _get("/jobs/edl_default/student", token[:-4]).status_code == 401
    assert _get("/openapi.json", token).status_code == 404


def test_a_task_s_job_is_for_those_who_may_read_the_logs_of_its_dag(
    world: World, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once it is removed, and a pool as well; who asks learns no more of it than of one that is not there."""
    words = ("python", "-c", "print('a word')")
    for name, kind, dag in (
        ("payroll", "trainer", "secret"),
        ("wages", "pool", "secret"),
        ("night", "pool", "nightly"),
    ):
        spec = JobSpec(name=name, kind=kind, command=words, bounds=Bounds(1, 1), instances=1)  # type: ignore[arg-type]
        asyncio.run(world.backend.submit(spec, token=f"{dag}/{name}-1234/1", secrets={}))
    wait_until(lambda: world.jobs()["payroll"] == "succeeded")
    monkeypatch.setattr(Roles, "readable", ("nightly",))
    secret = ("jobs/edl_default/payroll", "jobs/edl_default/payroll/log", "pools/edl_default/wages")
    denied = [_get(f"/{page}", token) for page in (*secret, "jobs/edl_default/nobody", "jobs/edl_default/student/log")]
    assert {(page.status_code, page.text) for page in denied} == {(403, denied[0].text)}
    assert _get("/pools/edl_default/night", token).status_code == 200
    monkeypatch.setattr(Roles, "readable", ("secret",))
    assert [_get(f"/{page}", token).status_code for page in secret] == [200] * 3
    asyncio.run(world.backend.delete("payroll"))
    assert "a word" in _get("/jobs/edl_default/payroll/log", token).text
    monkeypatch.setattr(Roles, "readable", ("nightly",))
    assert _get("/jobs/edl_default/payroll/log", token).status_code == 403


@pytest.mark.parametrize("entity", [None, DagAccessEntity.TASK_LOGS])
def test_who_may_read_a_dag_and_not_its_logs_sees_no_job_of_it(
    world: World, token: str, monkeypatch: pytest.MonkeyPatch, entity: DagAccessEntity | None
) -> None:
    """Nor does who may read the logs and not the DAG; and the same of what no task has started, by all DAGs'."""
    words = ("python", "-c", "print('a word')")
    spec = JobSpec(name="night", kind="trainer", command=words, bounds=Bounds(1, 1), instances=1)
    asyncio.run(world.backend.submit(spec, token="nightly/night-1234/1", secrets={}))
    wait_until(lambda: world.jobs()["night"] == "succeeded")
    paths = [f"/jobs/edl_default/{page}" for page in ("night", "night/log", "student", "student/log")]
    assert [_get(path, token).status_code for path in paths] == [200] * 4
    monkeypatch.setattr(Roles, "hidden", (entity,))
    assert [_get(path, token).status_code for path in paths] == [403] * 4


def test_of_a_pool_that_no_task_has_started_only_the_log_is_for_few(
    world: World, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Students of many DAGs ask it, and see there who its members are."""
    words = ("python", "-c", "raise SystemExit('the prices of all')")
    spec = JobSpec(name="shared", kind="pool", command=words, bounds=Bounds(1, 1), instances=1)
    asyncio.run(world.backend.submit(spec, token="edl-submit-1/0", secrets={}))
    wait_until(lambda: asyncio.run(world.backend.get("shared")).last_lines)
    assert "the prices of all" in _get("/pools/edl_default/shared", token).text
    monkeypatch.setattr(Roles, "readable", ())
    page = _get("/pools/edl_default/shared", token)
    assert (page.status_code, "the prices of all" in page.text) == (200, False)
    assert _get("/jobs/edl_default/shared/log", token).status_code == 403
    asyncio.run(world.backend.delete("shared"))


def test_a_large_log_costs_a_page_of_a_million_bytes(world: World, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is put together beside the loop that answers everybody else."""
    words = ("python", "-c", "for n in range(3000): print(n, 'x' * 2000)")
    spec = JobSpec(name="loud", kind="trainer", command=words, bounds=Bounds(1, 1), instances=1)
    asyncio.run(world.backend.submit(spec, token="nightly/loud-1234/1", secrets={}))
    wait_until(lambda: world.jobs()["loud"] == "succeeded")
    threads = []
    render = pages.log_page

    def seen(*given: Any, **named: Any) -> str:
        threads.append(threading.current_thread())
        return render(*given, **named)

    monkeypatch.setattr(pages, "log_page", seen)
    page = _get("/jobs/edl_default/loud/log?tail=10000", token)
    assert page.status_code == 200
    assert "2999 xxx" in page.text
    assert "earlier lines are left out here" in page.text
    assert len(page.content) < 1_100_000
    assert threading.main_thread() not in threads
    assert _get("/jobs/edl_default/loud/log?tail=100000", token).status_code == 422


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


def test_the_pages_show_how_far_the_job_is_and_who_is_the_limit(world: World, token: str) -> None:
    """As the student reported last: in this run, as another was before a clear; in the last run of a removed job."""
    created_at = asyncio.run(world.backend.get("student")).created_at

    async def report(updated_at: float) -> None:
        report = Progress(step=7, updated_at=updated_at, limit="student", busy=0.2)
        async with connect(world.redis_url) as client:
            await publish_progress(client, world.namespace, "student", report)

    def shown() -> list[bool]:
        logged = ("step 7 · 0 samples/s", "the student is the limit: teachers are idle 80 % of the time")
        pages = [html.unescape(_get(f"/jobs/edl_default/student{page}", token).text) for page in ("", "/log")]
        return [all(part in page for part in logged) for page in pages]

    asyncio.run(report(created_at - 1))
    assert shown() == [False, False]
    asyncio.run(report(created_at + 1))
    assert shown() == [True, True]
    asyncio.run(world.backend.delete("student"))
    assert shown() == [False, True], "the page of a removed job only leads to its log"


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
