"""A pool that is as large as its student needs, on the local backend, and a window that closes on it."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from support.paths import TESTS
from support.students.readers import POOL, ROWS, Batches, reader_of

from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.autoscale.rescale import rescale
from edl_runtime.autoscale.traffic.schema import to_windows
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.distill import Discovered
from edl_runtime.pods import Pod
from edl_runtime.registry.pools import read_demands
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, JobSpec
from edl_runtime.store.redis_client import connect

BOUNDS = Bounds(1, 3)
ANSWER_S = 0.04
"""How long a teacher takes for a batch, of which the student never has enough."""
PATIENCE_S = 100.0
TEACHER = (sys.executable, "-m", "edl_runtime.cli", "teacher")


def train(settings: RuntimeSettings, over: threading.Event) -> int:
    """Return how many batches there were until told to stop; each came once, in order."""
    batches, seen = Batches(10**6, ANSWER_S), []
    with reader_of(batches, Discovered(POOL), settings, teacher_batch_size=ROWS) as reader:
        for batch in reader:
            seen.append(batch)
            if over.is_set():
                break
    batches.count = len(seen)
    batches.check(seen)
    return len(seen)


@pytest.mark.deep
@pytest.mark.timeout(300)
async def test_a_pool_grows_while_its_student_waits_and_shrinks_with_its_window(
    settings: RuntimeSettings, work_dir: Path
) -> None:
    """Up to its limit, and to one teacher when no more are allowed; the student loses nothing."""
    backend, over, sizes = LocalBackend(work_dir), threading.Event(), [BOUNDS.min]
    plain = msgspec.structs.replace(settings, redis_url="", pool=POOL)
    spec = JobSpec(
        name=POOL,
        kind="pool",
        command=(
            sys.executable,
            *["-m", "edl_runtime.cli", "teacher", "--model", "support.models:slow", "--max-batch", "1"],
        ),
        bounds=BOUNDS,
        instances=BOUNDS.min,
        env={**plain.to_env(), "PYTHONPATH": str(TESTS)},
        pod=Pod(resources={"cpu": "100m"}),
    )

    async def follow(rules: RescalingRules, size: int) -> None:
        """Make passes until there are to be so many teachers, and the student has said that it uses all of them."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                done = await rescale(backend, client, settings.namespace, rules)
                sizes.extend(change.target for change in done.plan.changes)
                said = (await read_demands(client, settings.namespace, [POOL]))[POOL]
                used = [report.teachers for report in said.students.values() if report is not None]
                if (sizes[-1], len(said.teachers), used) == (size, size, [size]):
                    return
                await asyncio.sleep(0.5)

    async with connect(settings.redis_url) as client:
        await backend.submit(spec, token="test", secrets={"EDL_REDIS_URL": settings.redis_url})
        trained = asyncio.create_task(asyncio.to_thread(train, settings, over))
        try:
            await follow(RescalingRules(), BOUNDS.max)
            await follow(RescalingRules(windows=to_windows({"windows": [], "default": {"pools": {POOL: 1}}})), 1)
        finally:
            over.set()
            await asyncio.wait([trained])
            await backend.delete(POOL)
    assert trained.result() > 0
    assert sizes in ([1, 2, 3, 1], [1, 3, 1])
