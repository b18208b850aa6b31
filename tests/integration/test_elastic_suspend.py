"""A training that is suspended and goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.backends.jobs import eventually, lines, reach
from support.checkpoints.snapshots import steps_of
from support.depth import examples
from support.elastic.agent_group import SCRIPT
from support.elastic.fake_agent import batches_of, generations_of, stepped

from edl_runtime.backends.base import Backend
from edl_runtime.backends.local import LocalBackend
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.elastic.job import elastic_job
from edl_runtime.specs import Bounds, Checkpoint, JobSpec

pytestmark = pytest.mark.slow

EPOCHS = 60
ONCE = batches_of(150, 64, EPOCHS)


def training(out: Path, kept: Checkpoint, namespace: str) -> JobSpec:
    """Return a job of two or three instances, which begins with three."""
    script = JobSpec(
        name="elastic",
        kind="trainer",
        command=("python", str(SCRIPT), str(out)),
        bounds=Bounds(1, 1),
        instances=1,
        env={
            **kept.to_env(),
            "SCRIPT_OPTIONS": json.dumps({"epochs": EPOCHS, "step_s": 0.05}),
            "EDL_NAMESPACE": namespace,
            "OMP_NUM_THREADS": "1",
            "GLOG_minloglevel": "2",
            "PYTHONWARNINGS": "ignore",
        },
    )
    return elastic_job(script, Bounds(2, 3), start=3)


async def steps_on(out: Path, count: int) -> int:
    """Wait until so many more steps are done, and return the last."""
    before = max(generations_of(out), default=0)

    async def look() -> bool:
        return max(generations_of(out), default=0) >= before + count

    await eventually(look, f"{count} steps after {before}")
    return max(generations_of(out))


async def suspended(backend: Backend, kept: Checkpoint, out: Path) -> int:
    """Suspend the job, and return the step that it has come to; which is that of the newest checkpoint."""
    await backend.resize("elastic", 0)
    status = await reach(backend, "elastic", lambda status: not status.instances)
    assert status.is_suspended
    done = max(generations_of(out))
    assert steps_of(CheckpointStore(kept))[0] == done, await lines(backend, "elastic", tail=20)
    return done


@pytest.mark.timeout(300)
async def test_a_training_that_is_suspended_goes_on_where_it_was(
    work_dir: Path, tmp_path: Path, redis_url: str, namespace: str
) -> None:
    """All are told to go at once, one of them writes what it has, and with any number no step is lost or done twice.

    No other checkpoint is due in this training.
    """
    out = tmp_path / "out"
    out.mkdir()
    kept = Checkpoint(url=str(tmp_path / "kept"), every_steps=10**6)
    backend = LocalBackend(work_dir)
    try:
        submitted = await backend.submit(
            training(out, kept, namespace), token="mine", secrets={"EDL_REDIS_URL": redis_url}
        )
        assert submitted.scaling is not None
        assert submitted.scaling.resumes
        for instances in (2, 3, 3)[: examples(1, 3)]:
            await steps_on(out, 15)
            await suspended(backend, kept, out)
            await backend.resize("elastic", instances)
        status = await reach(backend, "elastic", lambda status: status.has_ended)
        assert (status.phase, status.reason) == ("succeeded", ""), "\n".join(status.last_lines)
    finally:
        await backend.delete("elastic")
    assert stepped(out) == ONCE
    assert [step for step, generations in generations_of(out).items() if len(generations) > 1] == []
    assert steps_of(CheckpointStore(kept))[0] == len(ONCE)
