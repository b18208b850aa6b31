"""A pool that is as large as its student needs, on the local backend, and a window that closes on it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.paths import TESTS
from support.students.readers import POOL, ROWS, Batches, reader_of

from edl_runtime.autoscale.plan import Rules
from edl_runtime.autoscale.rescale import rescale
from edl_runtime.autoscale.traffic_schema import to_windows
from edl_runtime.backends.local import LocalBackend
from edl_runtime.distill import Discovered
from edl_runtime.pods import Pod
from edl_runtime.registry.demands import demands
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, JobSpec
from edl_runtime.store.client import connect

if TYPE_CHECKING:
    from redis.asyncio import Redis

BOUNDS = Bounds(1, 3)
ANSWER_S = 0.04
"""How long a teacher takes for a batch, of which the student never has enough."""
PATIENCE_S = 100.0


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


class Follower:
    """Rescales all there is, the pool alone, pass by pass under `rules`."""

    def __init__(self, backend: LocalBackend, client: Redis, namespace: str) -> None:
        self.rules = Rules()
        self.sizes = [BOUNDS.min]
        self._backend = backend
        self._client = client
        self._namespace = namespace

    async def passes(self) -> None:
        """Make one twice a second, until cancelled."""
        while True:
            done = await rescale(self._backend, self._client, self._namespace, self.rules)
            for change in done.plan.changes:
                self.sizes.append(change.target)
            await asyncio.sleep(0.5)

    async def until(self, size: int) -> None:
        """Wait until the pool is to have so many teachers, and the student has said that it uses all of them."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                said = (await demands(self._client, self._namespace, [POOL]))[POOL]
                used = [report.teachers for report in said.students.values() if report is not None]
                if (self.sizes[-1], len(said.teachers), used) == (size, size, [size]):
                    return
                await asyncio.sleep(0.2)


@asynccontextmanager
async def following(settings: RuntimeSettings, work_dir: Path) -> AsyncIterator[Follower]:
    """Run the pool, with one teacher at first, and what sizes it."""
    teacher = (sys.executable, "-m", "edl_runtime.cli", "teacher", "--model", "support.models:slow", "--max_batch", "1")
    plain = msgspec.structs.replace(settings, redis_url="", pool=POOL)
    spec = JobSpec(
        name=POOL,
        kind="pool",
        command=teacher,
        bounds=BOUNDS,
        instances=BOUNDS.min,
        env={**plain.to_env(), "PYTHONPATH": str(TESTS)},
        pod=Pod(resources={"cpu": "100m"}),
    )
    backend = LocalBackend(work_dir)
    async with connect(settings.redis_url) as client:
        await backend.submit(spec, token="test", secrets={"EDL_REDIS_URL": settings.redis_url})
        follower = Follower(backend, client, settings.namespace)
        try:
            yield follower
        finally:
            await backend.delete(POOL)


@pytest.mark.deep
@pytest.mark.timeout(300)
async def test_a_pool_grows_while_its_student_waits_and_shrinks_with_its_window(
    settings: RuntimeSettings, work_dir: Path
) -> None:
    """Up to its limit, and to one teacher when no more are allowed; the student loses nothing."""
    over = threading.Event()
    async with following(settings, work_dir) as follower:
        with ThreadPoolExecutor(1) as threads:
            trained = asyncio.wrap_future(threads.submit(train, settings, over))
            passes = asyncio.create_task(follower.passes())
            try:
                await follower.until(BOUNDS.max)
                follower.rules = Rules(windows=to_windows({"windows": [], "default": {"pools": {POOL: 1}}}))
                await follower.until(1)
            finally:
                over.set()
                passes.cancel()
                assert await trained > 0
                await asyncio.wait([passes])
    assert follower.sizes in ([1, 2, 3, 1], [1, 3, 1])
