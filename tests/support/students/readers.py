"""Readers of real teachers for tests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from support.registry import followers
from support.teachers.process import PATIENCE_S, Teacher, running_teacher

from edl_runtime.distill import Discovered, DistillReader, Fixed
from edl_runtime.distill.loop import LoopThread
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings

ROWS = 8
POOL = "pool"


class Batches:
    """A source whose batches tell which they are; each request takes the teacher `seconds`."""

    def __init__(self, count: int, seconds: float = 0.0) -> None:
        self.count = count
        self.seconds = seconds

    def __call__(self) -> Iterator[tuple[Array]]:
        for number in range(self.count):
            x = np.zeros((ROWS, 4), np.float32)
            x[:, 0], x[:, 1], x[:, 2] = self.seconds, number, np.arange(ROWS)
            yield (x,)

    def check(self, epoch: list[Any]) -> None:
        """Each batch once, in order, with its own answers."""
        assert [int(x[0, 1]) for x, _ in epoch] == list(range(self.count))
        for x, double in epoch:
            np.testing.assert_array_equal(double, x * 2)


def reader_of(source: Any, teachers: Fixed | Discovered, settings: RuntimeSettings, **options: Any) -> DistillReader:
    options = {"inputs": ["x"], "outputs": ["double"], "teacher_batch_size": 4, **options}
    return DistillReader(source, teachers=teachers, settings=settings, **options)


def slow_teacher(settings: RuntimeSettings, *flags: str) -> contextlib.AbstractContextManager[Teacher]:
    """A teacher in the pool that takes as long as it is told."""
    return running_teacher("support.models:slow", "--pool", POOL, *flags, env=settings.to_env())


@contextlib.contextmanager
def registered(settings: RuntimeSettings, *addresses: str, pool: str = POOL) -> Iterator[None]:
    """Have teachers in the pool that do not register by themselves."""
    there, leave = threading.Event(), threading.Event()

    async def stay() -> None:
        async with followers.registered(settings, *addresses, ttl_s=settings.lease_ttl_s, pool=pool):
            there.set()
            await asyncio.to_thread(leave.wait)

    thread = LoopThread("registered", stay)
    thread.start()
    try:
        assert there.wait(PATIENCE_S)
        yield
    finally:
        leave.set()
        thread.join(PATIENCE_S)
