"""Readers of real teachers, and teachers with faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from support.registry import followers
from support.teachers import faulty_teacher
from support.teachers.process import PATIENCE_S, Teacher, running_teacher, wait_until

from edl_runtime.distill import Discovered, DistillReader, Fixed
from edl_runtime.distill.event_loop_thread import EventLoopThread
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings

ROWS = 8
POOL = "pool"


class Batches:
    """A source of numbered batches; each request takes the teacher `seconds`."""

    def __init__(self, count: int, seconds: float = 0.0) -> None:
        self.count = count
        self.seconds = seconds

    def __call__(self) -> Iterator[tuple[Array]]:
        for number in range(self.count):
            x = np.zeros((ROWS, 4), np.float32)
            x[:, 0], x[:, 1], x[:, 2] = self.seconds, number, np.arange(ROWS)
            yield (x,)

    def check(self, epoch: list[Any]) -> None:
        """Check that an epoch has each batch once, in order, with its own answers."""
        assert [int(x[0, 1]) for x, _ in epoch] == list(range(self.count))
        for x, double in epoch:
            np.testing.assert_array_equal(double, x * 2)


def reader_of(source: Any, teachers: Fixed | Discovered, settings: RuntimeSettings, **options: Any) -> DistillReader:
    options = {"inputs": ["x"], "outputs": ["double"], "teacher_batch_size": 4, **options}
    return DistillReader(source, teachers=teachers, settings=settings, **options)


def await_cause(reader: DistillReader) -> None:
    """Let a reader look for its teachers until it knows why it has none."""
    engine = reader._engine()
    engine.start()
    (dispatcher,) = engine.pipeline.dispatchers
    wait_until(lambda: dispatcher.timeout.last_error)


def slow_teacher(settings: RuntimeSettings, *flags: str) -> contextlib.AbstractContextManager[Teacher]:
    """Run a teacher in the pool that takes as long as each request says."""
    return running_teacher("support.models:slow", "--pool", POOL, *flags, env=settings.to_env())


@contextlib.contextmanager
def registered(settings: RuntimeSettings, *addresses: str, pool: str = POOL) -> Iterator[None]:
    """Register teachers in the pool that do not register by themselves."""
    ready, leave = threading.Event(), threading.Event()

    async def stay() -> None:
        async with followers.registered(settings, *addresses, ttl_s=settings.lease_ttl_s, pool=pool):
            ready.set()
            await asyncio.to_thread(leave.wait)

    thread = EventLoopThread("registered", stay)
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield
    finally:
        leave.set()
        thread.join(PATIENCE_S)


def read_epoch(
    reader: DistillReader, fault: Callable[[], object], when: Callable[[], bool] = lambda: True
) -> list[Any]:
    """Read an epoch; call `fault` after the first batch for which `when` is true."""
    batches: list[Any] = []
    happened = False
    for batch in reader:
        batches.append(batch)
        if not happened and when():
            fault()
            happened = True
    assert happened, "the epoch was over before the fault"
    return batches


def all_answered(reader: DistillReader, teachers: int) -> Callable[[], bool]:
    """Return a condition: answers of `teachers` teachers have been delivered."""
    return lambda: len(reader.stats().answered) == teachers


class Request(NamedTuple):
    """A request: the client's port, and its first batch and row."""

    port: int
    batch: int
    row: int


class FaultyTeacher:
    """A running `faulty_teacher.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.address = self._line()

    def set_behaviour(self, behaviour: str) -> None:
        """Answer every request from now on so."""
        assert self.process.stdin is not None
        print(behaviour, file=self.process.stdin, flush=True)
        assert self._line() == "done"

    def requests(self) -> list[Request]:
        """Return the requests since the last change of behaviour."""
        with urllib.request.urlopen(f"http://{self.address}/requests", timeout=PATIENCE_S) as answer:
            return [Request(*request) for request in json.load(answer)]

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def running_faulty_teacher(metadata: str) -> Iterator[FaultyTeacher]:
    """Start one with this metadata of its model; it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, str(Path(faulty_teacher.__file__)), metadata],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield FaultyTeacher(process)
    finally:
        process.kill()
        process.communicate()


def metadata_of(address: str) -> str:
    """Return the metadata of the model of the teacher at that address, as JSON."""
    with urllib.request.urlopen(f"http://{address}{faulty_teacher.METADATA}", timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def read_until(reader: DistillReader, batches: Batches, condition: Callable[[], bool]) -> None:
    """Read epochs until a condition is true. Fails after `PATIENCE_S`."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        batches.check(list(reader))
        assert time.monotonic() < end, "the condition did not become true"
