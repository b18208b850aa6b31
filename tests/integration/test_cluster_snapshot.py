"""What a pass of the rescaling reads from a real Redis and decides by: students' needs, the web's, jobs' speeds."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import msgspec
import pytest
from structlog.testing import capture_logs
from support.autoscale.backend import CPUS, Jobs
from support.autoscale.jobs import job

from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.autoscale.rescale import rescale
from edl_runtime.autoscale.traffic.schema import to_windows
from edl_runtime.backends.interface import JobStatus
from edl_runtime.pool_reports import StudentReport, TeacherReport
from edl_runtime.progress import Progress, publish_progress
from edl_runtime.registry import lease as lease_module
from edl_runtime.registry import pools as pools_module
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member, student_id
from edl_runtime.specs import Bounds
from edl_runtime.store import keys
from edl_runtime.store.keys import Service

if TYPE_CHECKING:
    from redis.asyncio import Redis

BUSY = TeacherReport(busy=1.0, over_s=10.0)
WAITS = StudentReport(waiting=0.5, asked=2.0, samples_per_s=80.0, teachers=2, over_s=10.0)


def pool(name: str, teachers: int) -> JobStatus:
    return job(name, Bounds(1, 9), 1.0, teachers, kind="pool", elastic=False)


async def test_pools_become_as_large_as_their_students_need(
    client: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one whose student waits grows, though at most to twice its size; the one without students shrinks."""
    monkeypatch.setattr(lease_module, "RENEW_EVERY_S", 600.0)  # what is reported here stays
    monkeypatch.setattr(pools_module, "STALE_AFTER_S", 600.0)
    backend = Jobs(pool("wanted", 2), pool("unwanted", 3))
    async with AsyncExitStack() as held:
        for name, report in (("t0", BUSY), ("t1", BUSY), ("s0", WAITS)):
            service = Service(namespace, "wanted", "students" if report is WAITS else "teachers")
            await held.enter_async_context(hold_lease(client, service, Member(id=name, address="h:1"), ttl_s=600))
            said = {"at": time.time(), **msgspec.to_builtins(report)}
            await client.hset(keys.service_key(service, "reports"), name, msgspec.json.encode(said))
            await client.hdel(keys.service_key(service, "clock"), "changed")  # so it has been there for long
        done = await rescale(backend, client, namespace, RescalingRules())
    assert backend.wanted == {"wanted": 4, "unwanted": 1}
    assert "students wait 50 % of the time, teachers are busy 100 %" in done.plan.targets[1].reason


async def test_a_pool_that_a_student_is_registered_with_is_not_suspended(client: Redis, namespace: str) -> None:
    """Though the student's own place is all that training may use; one without students is."""
    backend = Jobs(job("student", Bounds(1, 1), 1.0, 1, elastic=False), pool("used", 2), pool("unused", 2))
    windows = to_windows({"windows": [], "default": {"cluster": {"cpu": 1}}})
    async with hold_lease(client, Service(namespace, "used", "students"), Member(id="s0", address=""), ttl_s=600):
        await rescale(backend, client, namespace, RescalingRules(windows=windows))
    assert backend.wanted == {"student": 1, "used": 1, "unused": 0}


async def test_a_pool_whose_teachers_answer_other_clients_is_not_suspended(
    client: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They join no pool, as those of Triton and KServe, and the teachers' reports tell of them."""
    monkeypatch.setattr(lease_module, "RENEW_EVERY_S", 600.0)  # what is reported here stays
    monkeypatch.setattr(pools_module, "STALE_AFTER_S", 600.0)
    for report, wanted in ((BUSY, 1), (msgspec.structs.replace(BUSY, busy=0.0), 0)):
        backend = Jobs(pool("answers", 1), job("waits", Bounds(1, 1), 1.0, 0, pending=1))
        service = Service(namespace, "answers", "teachers")
        windows = to_windows({"windows": [], "default": {"cluster": {"cpu": 1}}})
        async with hold_lease(client, service, Member(id="t0", address="h:1"), ttl_s=600):
            said = {"at": time.time(), **msgspec.to_builtins(report)}
            await client.hset(keys.service_key(service, "reports"), "t0", msgspec.json.encode(said))
            await rescale(backend, client, namespace, RescalingRules(windows=windows))
        assert backend.wanted == {"answers": wanted, "waits": 1 - wanted}


async def test_a_pool_is_suspended_with_the_job_that_is_its_only_student(client: Redis, namespace: str) -> None:
    """It knows the job by what the student has registered as; nobody is left to wait for its teachers."""
    backend = Jobs(job("trains", Bounds(1, 1), 1.0, 1), pool("used", 1))
    windows = to_windows({"windows": [], "default": {"cluster": {"cpu": 1}}})
    student = Member(id=student_id("trains", 0), address="")
    async with hold_lease(client, Service(namespace, "used", "students"), student, ttl_s=600):
        await rescale(backend, client, namespace, RescalingRules(windows=windows))
    assert backend.wanted == {"trains": 0, "used": 0}


async def test_what_the_web_needs_is_left_to_it(client: Redis, namespace: str) -> None:
    """Windows that name a source give training what is left beside it, and not what they declare."""
    now_s = time.time()
    async with client.pipeline(transaction=False) as two_weeks:
        for minutes in range(14 * 24 * 60, 0, -10):
            two_weeks.xadd(f"web-{namespace}", {"needed": 20}, id=f"{(now_s - 60 * minutes) * 1000:.0f}-0")
        await two_weeks.execute()
    declared = {"windows": [], "default": {"cluster": {"cpu": CPUS}}}
    source = {"traffic": {"resource": "cpu", "redis": {"stream": f"web-{namespace}"}}}
    found = {}
    for windows in (declared, {**declared, **source}):
        backend = Jobs(job("job", Bounds(1, CPUS), 1.0, CPUS))
        done = await rescale(backend, client, namespace, RescalingRules(windows=to_windows(windows)))
        found[done.plan.why] = backend.wanted["job"]
    assert found == {
        "the default sizes hold": CPUS,
        "the web is expected to need 20 cpu now, and is left 23": CPUS - 23,
    }


async def test_room_goes_to_whom_it_was_measured_to_help(client: Redis, namespace: str) -> None:
    """Jobs of which nothing is known have equal numbers, until passes have seen that one of them gains nothing."""

    async def a_pass(size: int) -> dict[str, int]:
        backend = Jobs(*(job(name, Bounds(1, 9), 1.0, size) for name in ("gains", "idles")))
        await rescale(backend, client, namespace, RescalingRules(max_load=8 / CPUS))
        return backend.wanted

    assert await a_pass(2) == {"gains": 4, "idles": 4}
    for size in (1, 2):
        for name, speed in (("gains", 100.0 * size), ("idles", 100.0)):
            report = Progress(step=1, updated_at=time.time(), samples_per_s=speed, instances=size)
            await publish_progress(client, namespace, name, report)
        wanted = await a_pass(size)
    assert wanted == {"gains": 7, "idles": 1}


async def test_what_one_job_has_in_redis_stops_no_rescaling_of_others(client: Redis, namespace: str) -> None:
    """A pool whose reports can't be read keeps its size, and a job whose speeds can't be has none."""
    backend = Jobs(
        job("evil", Bounds(1, 9), 1.0, 1), job("other", Bounds(1, 9), 1.0, 1), pool("bad", 2), pool("good", 2)
    )
    await client.hset(keys.speeds(namespace, "evil"), "1" + "0" * 4000, "1.0")
    await client.hset(keys.speeds(namespace, "evil"), "2", "1.0")
    await client.set(keys.speeds(namespace, "other"), "?")
    await client.set(keys.service_key(Service(namespace, "bad"), "leases"), "?")
    with capture_logs() as logs:
        done = await rescale(backend, client, namespace, RescalingRules())
    assert backend.wanted == {"evil": 9, "other": 9, "bad": 2, "good": 1}
    (target,) = [one for one in done.plan.targets if one.name == "bad"]
    assert target.reason.startswith("stays as it is: the record in Redis at ")
    causes = {entry["job"]: entry["cause"] for entry in logs if entry["event"] == "speed.unreadable"}
    assert "OverflowError" in causes["evil"]
    assert "WRONGTYPE" in causes["other"]
