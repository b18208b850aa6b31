"""A pool that is as large as its student needs, on the local backend, and a window that closes on it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from support.paths import TESTS
from support.students.readers import POOL, ROWS, reader_of

from edl_runtime.autoscale.plan import Rules
from edl_runtime.autoscale.rescale import rescale
from edl_runtime.autoscale.traffic_schema import to_windows
from edl_runtime.backends.local import LocalBackend
from edl_runtime.distill import Discovered
from edl_runtime.pods import Pod
from edl_runtime.protocol.tensors import Array
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


class Student:
    """Trains in a thread of its own until told to stop, and checks each batch: every one once, in order."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self.taken = 0
        self._settings = settings
        self._given = 0
        self._over = threading.Event()

    def stop(self) -> None:
        self._over.set()

    def train(self) -> int:
        """Return how many batches there were once all of them are taken."""
        with reader_of(self._batches, Discovered(POOL), self._settings, teacher_batch_size=ROWS) as reader:
            for x, double in reader:
                assert (x[:, 1] == self.taken).all()
                assert (x[:, 2] == np.arange(ROWS)).all()
                np.testing.assert_array_equal(double, x * 2)
                self.taken += 1
        assert self.taken == self._given
        return self.taken

    def _batches(self) -> Iterator[tuple[Array]]:
        while not self._over.is_set():
            x = np.zeros((ROWS, 4), np.float32)
            x[:, 0], x[:, 1], x[:, 2] = ANSWER_S, self._given, np.arange(ROWS)
            self._given += 1
            yield (x,)


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
    student = Student(settings)
    async with following(settings, work_dir) as follower:
        with ThreadPoolExecutor(1) as threads:
            trained = asyncio.wrap_future(threads.submit(student.train))
            passes = asyncio.create_task(follower.passes())
            try:
                await follower.until(BOUNDS.max)
                follower.rules = Rules(windows=to_windows({"windows": [], "default": {"pools": {POOL: 1}}}))
                await follower.until(1)
            finally:
                student.stop()
                passes.cancel()
                assert await trained > 0
                await asyncio.wait([passes])
    assert follower.sizes in ([1, 2, 3, 1], [1, 3, 1])
