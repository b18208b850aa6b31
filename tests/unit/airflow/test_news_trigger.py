"""What tells Airflow that jobs have come or gone."""

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
from unit.airflow.made_up import MadeUpSite, job_status, work_of

from edl_airflow import conductor
from edl_airflow.assets import jobs_asset
from edl_airflow.triggers.news import EdlJobsTrigger
from edl_runtime.errors import SpecError


@asynccontextmanager
async def _events(trigger: EdlJobsTrigger) -> AsyncIterator[AsyncIterator[Any]]:
    async with aclosing(cast("Any", trigger.run())) as events:
        yield events


async def _next(events: AsyncIterator[Any]) -> list[tuple[str, str]]:
    event = await asyncio.wait_for(anext(events), 10)
    return [(one["job"], one["what"]) for one in json.loads(json.dumps(event.payload))["jobs"]]


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 (what is logged has no events)
            await asyncio.sleep(0.01)


async def test_many_at_a_time_are_one_event(site: MadeUpSite) -> None:
    """With the last news of each job; the next event has what came after it."""
    site.told = [("a", "submitted"), ("b", "submitted"), ("a", "ended")]
    async with _events(EdlJobsTrigger(settle_s=0.05)) as events:
        assert await _next(events) == [("b", "submitted"), ("a", "ended")]
        site.told.append(("c", "submitted"))
        coming = asyncio.create_task(_next(events))
        await asyncio.sleep(0.02)
        site.told.append(("d", "submitted"))
        assert await coming == [("c", "submitted"), ("d", "submitted")]


async def test_a_redis_that_is_away_is_ridden_out(site: MadeUpSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fires meanwhile, and what is told after that does."""
    monkeypatch.setattr("edl_airflow.triggers.news.RETRY_EVERY_S", 0.01)
    site.away = True
    async with _events(EdlJobsTrigger(settle_s=0.01)) as events:
        coming = asyncio.create_task(_next(events))
        await asyncio.sleep(0.05)
        assert not coming.done()
        site.away = False
        site.told.append(("a", "submitted"))
        assert await coming == [("a", "submitted")]


async def test_a_connection_that_is_missing_or_wrong_is_waited_for(
    site: MadeUpSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow would start a watcher that raises again at once, without end; what is wrong is said once."""
    monkeypatch.setattr("edl_airflow.triggers.base.LOOK_UP_AGAIN_S", 0.01)
    given = {"conn_type": "edl", "host": "127.0.0.1", "port": 1}
    site.told = [("a", "submitted")]
    with capture_logs() as said:
        async with _events(EdlJobsTrigger("elsewhere", settle_s=0.01)) as events:
            coming = asyncio.create_task(_next(events))
            await _until(lambda: len(said) == 1)
            wrong = {**given, "extra": {"namespace": "NO NAME"}}
            monkeypatch.setenv("AIRFLOW_CONN_ELSEWHERE", json.dumps(wrong))
            await _until(lambda: len(said) == 2)
            await asyncio.sleep(0.05)
            assert not coming.done()
            monkeypatch.setenv("AIRFLOW_CONN_ELSEWHERE", json.dumps(given))
            assert await coming == [("a", "submitted")]
    assert [line["log_level"] for line in said] == ["warning", "warning"]
    assert "AirflowNotFoundException" in said[0]["cause"]
    assert "NO NAME" in said[1]["cause"]


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


async def test_tasks_tell_of_what_they_start_and_see_end(site: MadeUpSite) -> None:
    """Of the student alone while its pool still runs; what a later try has taken over has not ended."""
    site.registered = ["a:1", "b:1"]
    work = work_of()
    await conductor.begin(work, site)
    assert site.told == [("digits", "submitted")]

    async def ends() -> None:
        while "student" not in site.backend.jobs:  # noqa: ASYNC110 (the made-up backend has no events)
            await asyncio.sleep(0.01)
        site.backend.jobs["student"] = job_status("student", phase="succeeded")

    async with asyncio.TaskGroup() as group:
        group.create_task(ends())
        await conductor.conduct(work, site, lambda _: None)
    assert site.told[1:] == [("student", "submitted"), ("student", "ended")]
    assert site.backend.jobs["digits"].phase == "running"
    site.told.clear()
    site.backend.jobs["student"] = job_status("student", f"{work.token}/2")
    site.backend.jobs["digits"] = job_status("digits", "/2", kind="pool")
    outcome = await conductor.conduct(work_of(token="/1"), site, lambda _: None)
    assert outcome.ended == "taken_over"
    assert site.told == []


async def test_that_trainers_were_removed_is_told_and_that_a_task_takes_too_long_is_not(site: MadeUpSite) -> None:
    """By whoever follows them: trainers that run on have not ended, nor has a pool that may."""
    site.backend.jobs = {"student": job_status("student"), "digits": job_status("digits", kind="pool")}
    late = work_of(deadline=0.0)
    assert (await conductor.conduct(late, site, lambda _: None)).ended == "timed_out"
    assert site.told == []
    site.backend.forget_after("student", looks=1)
    assert (await conductor.conduct(work_of(), site, lambda _: None)).ended == "failed"
    assert site.told == [("student", "ended")]


async def test_trainers_whose_time_is_over_are_told_once_they_are_gone(site: MadeUpSite) -> None:
    """With their pool, which ends with them."""
    site.backend.jobs = {"student": job_status("student"), "digits": job_status("digits", kind="pool")}
    outcome = await conductor.conduct(work_of(ends_at=2.0, began_at=1.0, stop_grace_s=0.0), site, lambda _: None)
    assert outcome.ended == "stopped"
    assert site.told == [("student", "ended"), ("digits", "ended")]
    assert site.backend.jobs == {}
