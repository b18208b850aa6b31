"""What a planner needs to know: what decides a job's size, and what there is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.backends.jobs import WAITS, WITHIN_S, ended, job, reach, says

from edl_runtime.backends.interface import Backend, Scaling
from edl_runtime.pods import Pod
from edl_runtime.specs import Bounds

MIB = 1 << 20


def given(scaling: Scaling | None) -> dict[str, float]:
    """Return what an instance reserves, of what all backends know."""
    assert scaling is not None
    return {name: much for name, much in scaling.resources.items() if name != "pods"}


@pytest.mark.on_pods
async def test_a_job_tells_what_decides_its_size_until_it_has_ended(backend: Backend) -> None:
    """Its bounds, priority and weight as they were submitted; an instance reserves something though nothing is said."""
    pod = Pod(resources={"cpu": "30m", "memory": "48Mi"})
    asked = msgspec.structs.replace(job(WAITS), priority=-3, weight=2.5, pod=pod)
    submitted = await backend.submit(asked, token="mine", secrets={})
    for status in (submitted, await backend.get("job"), *await backend.list(), await backend.resize("job", 2)):
        scaling = status.scaling
        assert scaling is not None
        assert (scaling.bounds, scaling.priority, scaling.weight) == (Bounds(1, 4), -3, 2.5)
        assert given(scaling) == pytest.approx({"cpu": 0.03, "memory": 48 * MIB})
    plain = (await backend.submit(job("pass", kind="trainer"), token="mine", secrets={})).scaling
    assert plain is not None
    assert (plain.priority, plain.weight, bool(plain.resources)) == (0, 1.0, True)
    assert all(much > 0 for much in plain.resources.values())
    assert (await ended(backend)).scaling is None


@pytest.mark.on_pods
async def test_a_job_that_is_being_deleted_is_nobodys_to_plan(backend: Backend, tmp_path: Path) -> None:
    """From the delete on, as long as its instances take to leave, nothing decides any more how many it has."""
    go = tmp_path / "go"
    code = f"""
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up")
while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)
"""
    await backend.submit(job(code, instances=2, grace_s=WITHIN_S), token="mine", secrets={})
    await says(backend, "up", instances=2)
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
async def test_who_goes_on_where_it_was_says_so(backend: Backend, asked: dict[str, Any], *, resumes: bool) -> None:
    """Pools, which have nothing to lose, and elastic trainers that keep checkpoints."""
    submitted = await backend.submit(job(WAITS, **asked), token="mine", secrets={})
    assert submitted.scaling is not None
    assert submitted.scaling.resumes is resumes
