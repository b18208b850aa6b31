"""Asset events of jobs that were submitted, ended or became pending."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pkgutil import resolve_name
from typing import Any, cast

import pytest
from airflow.serialization.serialized_objects import BaseSerialization
from structlog.testing import capture_logs
from support.airflow.fakes import FakeClient, job_status

from edl_airflow.assets import jobs_asset
from edl_airflow.triggers.jobs import EdlJobsTrigger
from edl_runtime.backends.errors import ClusterUnavailableError
from edl_runtime.backends.interface import InstanceStatus, Scaling
from edl_runtime.errors import SpecError
from edl_runtime.specs import Bounds


@asynccontextmanager
async def _events(trigger: EdlJobsTrigger) -> AsyncIterator[AsyncIterator[Any]]:
    async with aclosing(cast("Any", trigger.run())) as events:
        yield events


async def _next(events: AsyncIterator[Any]) -> list[tuple[str, str]]:
    event = await asyncio.wait_for(anext(events), 60)
    return [(one["job"], one["what"]) for one in json.loads(json.dumps(event.payload))["jobs"]]


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 (what is logged has no events)
            await asyncio.sleep(0.01)


async def _looked(site: FakeClient, times: int) -> None:
    looks = site.backend.lists
    await _until(lambda: site.backend.lists >= looks + times)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl_airflow.triggers.jobs.POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr("edl_airflow.triggers.jobs.LOOK_UP_AGAIN_S", 0.01)


SETTLES_S = 123.0


class Settling:
    """What happens while a trigger waits SETTLES_S: each such wait lasts until the next one of these is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.happens: list[Callable[[], None]] = []
        self._sleep = asyncio.sleep
        monkeypatch.setattr(asyncio, "sleep", self._settle)

    async def _settle(self, seconds: float) -> None:
        await self._sleep(0 if seconds == SETTLES_S else seconds)
        if seconds == SETTLES_S and self.happens:
            self.happens.pop(0)()


@pytest.fixture
def settling(monkeypatch: pytest.MonkeyPatch) -> Settling:
    return Settling(monkeypatch)


async def test_many_at_a_time_are_one_event(site: FakeClient, settling: Settling) -> None:
    """What is over by then is none; the next event has what came after it."""
    site.backend.jobs = {name: job_status(name) for name in ("b", "a")}
    async with _events(EdlJobsTrigger(settle_s=SETTLES_S)) as events:
        assert await _next(events) == [("a", "submitted"), ("b", "submitted")]

        def others_come_and_go() -> None:
            site.backend.jobs["d"] = job_status("d")
            del site.backend.jobs["a"], site.backend.jobs["short"]

        site.backend.jobs |= {name: job_status(name) for name in ("c", "short")}
        settling.happens = [others_come_and_go]
        assert await _next(events) == [("a", "ended"), ("c", "submitted"), ("d", "submitted")]


async def test_a_job_that_becomes_pending_later_fires_once(site: FakeClient, settling: Settling) -> None:
    """Not who has found another place meanwhile."""
    placed = InstanceStatus(index=0, phase="running", started_at=100.0, node="n1")
    evicted = InstanceStatus(index=0, phase="pending", started_at=200.0)

    def put(name: str, instance: InstanceStatus) -> None:
        scaling = Scaling(bounds=Bounds(1, 2), resources={"cpu": 1.0})
        site.backend.jobs[name] = job_status(name, scaling=scaling, instances=(instance,))

    put("a", placed)
    put("b", placed)
    async with _events(EdlJobsTrigger(settle_s=SETTLES_S)) as events:
        await _next(events)
        put("a", evicted)
        put("b", evicted)
        settling.happens = [lambda: put("b", placed)]
        assert await _next(events) == [("a", "pending")]
        coming = asyncio.create_task(_next(events))
        await _looked(site, times=5)
        put("c", placed)
        assert await coming == [("c", "submitted")]


async def test_a_cluster_that_is_away_is_ridden_out(site: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fires meanwhile, and what has happened then does once it is back. The cause is logged once."""
    list_jobs, tries = site.backend.list, []

    async def away() -> Any:
        tries.append("")
        raise ClusterUnavailableError("https://cluster", "timed out")

    site.backend.jobs = {name: job_status(name) for name in ("a", "b")}
    with capture_logs() as logged:
        async with _events(EdlJobsTrigger(settle_s=0.01)) as events:
            await _next(events)
            monkeypatch.setattr(site.backend, "list", away)
            coming = asyncio.create_task(_next(events))
            await _until(lambda: len(tries) > 3)
            del site.backend.jobs["a"]
            monkeypatch.setattr(site.backend, "list", list_jobs)
            assert await coming == [("a", "ended")]
    assert [line["event"] for line in logged] == ["jobs.unavailable"]


async def test_a_connection_that_is_missing_or_wrong_is_waited_for(
    site: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow would start a watcher that raises again at once, without end; the cause is logged once."""
    monkeypatch.setattr("edl_airflow.triggers.base.LOOK_UP_AGAIN_S", 0.01)
    given = {"conn_type": "edl", "host": "127.0.0.1", "port": 1}
    site.backend.jobs["a"] = job_status("a")
    with capture_logs() as logged:
        async with _events(EdlJobsTrigger("elsewhere", settle_s=0.01)) as events:
            coming = asyncio.create_task(_next(events))
            await _until(lambda: len(logged) == 1)
            wrong = {**given, "extra": {"namespace": "NO NAME"}}
            monkeypatch.setenv("AIRFLOW_CONN_ELSEWHERE", json.dumps(wrong))
            await _until(lambda: len(logged) == 2)
            assert not coming.done()
            monkeypatch.setenv("AIRFLOW_CONN_ELSEWHERE", json.dumps(given))
            assert await coming == [("a", "submitted")]
    assert [line["log_level"] for line in logged] == ["warning", "warning"]
    assert "AirflowNotFoundException" in logged[0]["cause"]
    assert "NO NAME" in logged[1]["cause"]


def test_the_asset_of_a_connection_is_watched_and_serializes() -> None:
    """Two connections have two assets; the trigger comes back from its serialized form."""
    assert jobs_asset().name == "edl_jobs:edl_default"
    asset = jobs_asset("team")
    assert asset.name == "edl_jobs:team"
    (watcher,) = asset.watchers
    path, kwargs = cast("EdlJobsTrigger", watcher.trigger).serialize()
    assert resolve_name(path)(**json.loads(json.dumps(kwargs))).serialize() == (path, kwargs)
    assert BaseSerialization.serialize(asset)
    with pytest.raises(SpecError, match="settle_s"):
        EdlJobsTrigger(settle_s=0)
