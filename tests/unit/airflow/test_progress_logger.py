"""What a task's log says of a student's progress."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from support.airflow.fakes import FakeClient, job_status, spec_of

from edl_airflow.runtime.decisions import TaskState
from edl_airflow.runtime.log import ProgressLogger
from edl_runtime.backends.interface import SUSPENDED, InstanceStatus, JobStatus, LogLine
from edl_runtime.progress import Progress

VIEW = TaskState(trainer=job_status("student"), started=True)


async def _logged(site: FakeClient, reports: list[dict[str, Any]]) -> list[str]:
    logged: list[str] = []
    async with ProgressLogger(spec_of(), site, logged.append) as progress_logger:
        for step, given in enumerate(reports, start=1):
            site.reports["student"] = Progress(step=step, updated_at=100.0 + step, **given)
            await progress_logger.update(VIEW)
    return logged


async def test_who_is_the_limit_is_said_when_that_changes(site: FakeClient) -> None:
    """Not with each percent, and not again because it was unclear for a while."""
    waits: list[dict[str, Any]] = [{"limit": "teachers", "waiting": share} for share in (0.38, 0.41)]
    reports: list[dict[str, Any]] = [{}, *waits, {}, waits[0], {"limit": "student", "busy": 0.1}, waits[1]]
    logged = await _logged(site, reports)
    assert len([line for line in logged if "samples/s" in line]) == len(reports)
    assert [line for line in logged if "samples/s" not in line] == [
        "step 2 · the teachers are the limit: the student waits 38 % of the time; more teachers would help",
        "step 6 · the student is the limit: teachers are idle 90 % of the time",
        "step 7 · the teachers are the limit: the student waits 41 % of the time; more teachers would help",
    ]


async def test_a_teacher_in_quarantine_is_named_once(site: FakeClient) -> None:
    """However often it comes back; and of many, a few are."""
    flaps = {"quarantined": {"a:1": "a:1: its answer has a wrong shape"}}
    many = {"quarantined": {f"b:{port}": "timed out" for port in range(1, 6)}}
    logged = await _logged(site, [flaps, {}, flaps, many])
    assert [line for line in logged if "samples/s" not in line] == [
        "step 1 · in quarantine: a:1 (its answer has a wrong shape)",
        "step 4 · in quarantine: b:1 (timed out); b:2 (timed out); b:3 (timed out); and 2 more",
    ]


def _with(name: str, *reasons: str, going: bool = True, **changes: Any) -> JobStatus:
    """A job or pool of instances that are in trouble for these reasons; `going`: the cluster ends them."""
    instances = tuple(
        InstanceStatus(
            index=index, phase="running", started_at=1.0, pod=f"{name}-{reason}", reason=reason, disruptions=int(going),
            disrupted=going,
        )
        for index, reason in enumerate(reasons)
    )  # fmt: skip
    return job_status(name, instances=instances, reason=reasons[0] if reasons else "", **changes)


async def _logged_of(site: FakeClient, *views: TaskState) -> list[str]:
    logged: list[str] = []
    async with ProgressLogger(spec_of(), site, logged.append) as progress_logger:
        for view in views:
            await progress_logger.update(view)
    return logged


async def test_an_instance_that_the_cluster_ends_is_logged_once(site: FakeClient) -> None:
    """As a count, and not as a trouble besides; other troubles are logged as before."""
    lost, late = _with("student", "instance 0 is lost", "instance 1 is lost"), _with("student", "no place", going=False)
    views = [TaskState(trainer=job, started=True) for job in (lost, lost, late, late)]
    assert await _logged_of(site, *views) == [
        "'student': instance 0 is lost",
        "'student': instance 1 is lost",
        "'student': no place",
    ]


async def test_teachers_that_the_cluster_ends_are_counted(site: FakeClient) -> None:
    """One by one: others take their places, and their numbers."""
    pools = [
        _with("digits", *reasons, kind="pool", going=going)
        for reasons, going in ((["a", "b"], True), (["a", "b"], True), (["c"], True), (["no place"], False))
    ]
    logged = await _logged_of(site, *(TaskState(pool=pool, teachers=()) for pool in pools))
    assert [line for line in logged if not line.startswith("Waiting")] == [
        "Pool 'digits': a: 1 by now",
        "Pool 'digits': b: 2 by now",
        "Pool 'digits': c: 3 by now",
        "Pool 'digits': no place",
    ]


async def test_teachers_that_their_nodes_have_evicted_are_counted(site: FakeClient) -> None:
    """Others have taken their places by then; one that was seen while it was going is counted once. Few are named."""
    going = _with("digits", "a", kind="pool")
    gone = job_status("digits", kind="pool", replaced={"digits-a": "pod digits-a was ended", "b": "pod b was ended"})
    many = msgspec.structs.replace(gone, replaced={**gone.replaced, **{f"c{n}": f"pod c{n}" for n in range(9)}})
    logged = await _logged_of(site, *(TaskState(pool=pool, teachers=()) for pool in (going, gone, gone, many, many)))
    assert [line for line in logged if not line.startswith("Waiting")] == [
        "Pool 'digits': a: 1 by now",
        "Pool 'digits': pod b was ended: 2 by now",
        "Pool 'digits': pod c6: 9 by now",
        "Pool 'digits': pod c7: 10 by now",
        "Pool 'digits': pod c8: 11 by now",
    ]


@pytest.mark.parametrize(("about", "name"), [("trainer", "'student'"), ("pool", "Pool 'digits'")])
async def test_what_is_wrong_is_said_once_each_time(site: FakeClient, about: str, name: str) -> None:
    """However often it is looked at meanwhile; the same trouble may come again."""
    views = [
        TaskState(
            **{"trainer": job_status("student"), about: job_status(name.split("'")[1], reason=reason)}, started=True
        )
        for reason in ("nobody answers", "nobody answers", "", "nobody answers")
    ]
    assert await _logged_of(site, *views) == [f"{name}: nobody answers"] * 2


async def test_the_last_lines_are_logged_unless_a_later_try_logs_them(site: FakeClient) -> None:
    """Also those of a training that is ended by force."""
    site.backend.written = [LogLine(0, "the last words")]
    for token, phase, logged_at_last in (
        ("try-1", "succeeded", ["[0] the last words"]),
        ("try-1", "running", ["[0] the last words"]),
        ("try-2", "running", []),
    ):
        logged: list[str] = []
        job = job_status("student", token, phase=phase)
        site.backend.jobs, site.positions = {"student": job}, {}
        view = TaskState(trainer=job, started=True)
        async with ProgressLogger(spec_of(progress_every_s=60.0), site, logged.append) as progress_logger:
            await progress_logger.update(view)
            assert progress_logger._log
            while not progress_logger._log._arrived:  # noqa: ASYNC110 (what was read has no event)
                await asyncio.sleep(0)
            await progress_logger.finish(view, is_over=phase != "running")
        assert logged == logged_at_last


async def test_how_far_it_came_is_said_at_the_end(site: FakeClient) -> None:
    """Once, also of a training that is over before its first report was looked for again; nothing if Redis is away."""
    for is_away in (False, True):
        site.reports.clear()
        logged: list[str] = []
        async with ProgressLogger(spec_of(progress_every_s=60.0), site, logged.append) as progress_logger:
            await progress_logger.update(VIEW)
            site.reports["student"] = Progress(step=7, updated_at=101.0)
            site.away = is_away
            for _ in range(2):
                await progress_logger.finish(VIEW, is_over=False)
        assert [line.partition(" · ")[0] for line in logged] == ([] if is_away else ["step 7"])


async def test_that_redis_is_away_is_said_once(site: FakeClient) -> None:
    """However often it is looked."""
    site.away = True
    (line,) = await _logged_of(site, VIEW, VIEW, VIEW)
    assert "The training continues" in line


async def test_that_a_job_is_suspended_is_said_once(site: FakeClient) -> None:
    """And again when it is for another time; of a pool as well as of trainers."""
    waits = {"wanted": 0, "phase": "pending", "reason": SUSPENDED}
    pool = {"kind": "pool", "name": "digits"}
    runs, rests = (
        TaskState(trainer=job_status("student"), started=True),
        TaskState(trainer=job_status("student", **waits)),
    )
    both = TaskState(pool=job_status(**pool, **waits), trainer=job_status("student"), started=True)
    logged = "suspended: it resumes when it is resized to one or more instances"
    assert await _logged_of(site, runs, rests, rests, runs, both, both, rests) == [
        f"'student': {logged}",
        f"Pool 'digits': {logged}",
        f"'student': {logged}",
    ]
