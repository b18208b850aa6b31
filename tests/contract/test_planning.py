"""What the autoscaler reads from a job's status."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.backends.jobs import WAITS, WITHIN_S, ended, job, reach, wait_for_line

from edl_runtime.backends.interface import Backend, Scaling
from edl_runtime.pods import Pod
from edl_runtime.specs import Bounds

MIB = 1 << 20


def resources_of(scaling: Scaling | None) -> dict[str, float]:
    """Return what an instance requests, without "pods", which only clusters know."""
    assert scaling is not None
    return {name: much for name, much in scaling.resources.items() if name != "pods"}


@pytest.mark.on_pods
async def test_the_status_has_bounds_priority_weight_and_resources_until_the_job_has_ended(backend: Backend) -> None:
    """As they were submitted; without resources in the spec an instance still requests some."""
    pod = Pod(resources={"cpu": "30m", "memory": "48Mi"})
    asked = msgspec.structs.replace(job(WAITS), priority=-3, weight=2.5, pod=pod)
    submitted = await backend.submit(asked, token="mine", secrets={})
    for status in (submitted, await backend.get("job"), *await backend.list(), await backend.resize("job", 2)):
        scaling = status.scaling
        assert scaling is not None
        assert (scaling.bounds, scaling.priority, scaling.weight) == (Bounds(1, 4), -3, 2.5)
        assert resources_of(scaling) == pytest.approx({"cpu": 0.03, "memory": 48 * MIB})
    plain = (await backend.submit(job("pass", kind="trainer"), token="mine", secrets={})).scaling
    assert plain is not None
    assert (plain.priority, plain.weight, bool(plain.resources)) == (0, 1.0, True)
    assert all(much > 0 for much in plain.resources.values())
    assert (await ended(backend)).scaling is None


@pytest.mark.on_pods
async def test_a_job_that_is_being_deleted_has_no_scaling(backend: Backend, tmp_path: Path) -> None:
    """From the delete on, while its instances still run."""
    go = tmp_path / "go"
    code = f"""
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up")
while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)
"""
    await backend.submit(job(code, instances=2, grace_s=WITHIN_S), token="mine", secrets={})
    await wait_for_line(backend, "up", instances=2)
    deleting = asyncio.create_task(backend.delete("job"))
    leaving = await reach(backend, "job", lambda status: status.scaling is None)
    assert not leaving.has_ended
    assert len(leaving.instances) == 2
    go.touch()
    assert await deleting


@pytest.mark.parametrize(
    ("asked", "resumes"),
    [
        ({"kind": "pool"}, True),
        ({"kind": "trainer", "elastic": True, "env": {"EDL_CHECKPOINT": "/tmp/x"}}, True),
        ({"kind": "trainer", "elastic": True, "env": {"EDL_CHECKPOINT": ""}}, False),
        ({"kind": "trainer", "elastic": True}, False),
        ({"kind": "trainer", "env": {"EDL_CHECKPOINT": "/tmp/x"}}, False),
    ],
)
async def test_the_status_has_whether_a_suspended_job_would_resume(
    backend: Backend, asked: dict[str, Any], *, resumes: bool
) -> None:
    """Pools, and elastic trainers with checkpoints."""
    submitted = await backend.submit(job(WAITS, **asked), token="mine", secrets={})
    assert submitted.scaling is not None
    assert submitted.scaling.resumes is resumes


@pytest.mark.on_pods
async def test_the_status_has_the_pool_that_instances_ask_or_join(backend: Backend) -> None:
    """By their EDL_POOL; a pool without one is its own."""
    for asked, pool in (
        (job(WAITS, kind="trainer", env={"EDL_POOL": "teachers"}), "teachers"),
        (job(WAITS, kind="pool", env={"EDL_POOL": "teachers"}), "teachers"),
        (job(WAITS, kind="pool"), "job"),
        (job(WAITS, kind="trainer"), ""),
    ):
        submitted = await backend.submit(asked, token="mine", secrets={})
        assert submitted.pool == (await backend.get("job")).pool == pool
        await backend.delete("job")
