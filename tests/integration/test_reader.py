"""DistillReader with real teachers: `edl teacher` processes, sockets, Redis."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from teacher_process import Teacher, running_teacher, wait_until

from edl_runtime import progress
from edl_runtime.distill import Discovered, DistillReader, Fixed
from edl_runtime.errors import DistillError, NoTeacherError, RegistryUnavailableError
from edl_runtime.protocol.tensors import Array
from edl_runtime.registry.directory import Directory
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.client import connect
from edl_runtime.store.server import RedisServer

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


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """No thread of a reader outlives its test."""
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("edl")] == []


@pytest.fixture
def settings(redis_url: str, namespace: str) -> RuntimeSettings:
    return RuntimeSettings(redis_url=redis_url, namespace=namespace, teacher_wait_s=15.0, lease_ttl_s=1.0)


def reader_of(source: Any, teachers: Fixed | Discovered, settings: RuntimeSettings, **options: Any) -> DistillReader:
    options = {"inputs": ["x"], "outputs": ["double"], "teacher_batch_size": 4, **options}
    return DistillReader(source, teachers=teachers, settings=settings, **options)


def slow_teacher(settings: RuntimeSettings, *flags: str) -> contextlib.AbstractContextManager[Teacher]:
    """A teacher in the pool that takes as long as it is told."""
    return running_teacher("served_models:slow", "--pool", POOL, *flags, env=settings.to_env())


def wait_for_teachers(settings: RuntimeSettings, count: int) -> None:
    """Return when so many are registered in the pool."""

    async def registered() -> int:
        async with connect(settings.redis_url) as client:
            return len(await Directory(client, settings.namespace).members(POOL))

    wait_until(lambda: asyncio.run(registered()) == count)


def test_all_three_formats_with_a_real_teacher() -> None:
    """What goes over the wire comes back at its place, in every format and with every size of request."""
    x = np.arange(10 * 4, dtype=np.float32).reshape(10, 4)
    expected = x * 2, x.sum(axis=1)
    sources: dict[str, list[Any]] = {
        "sample": [(row, number) for number, row in enumerate(x)],
        "sample_list": [[(row, number) for number, row in enumerate(x)]],
        "batch": [(x, np.arange(10))],
    }
    with running_teacher("served_models:arithmetic") as teacher:
        for kind, source in sources.items():
            for size in (1, 4, 16):
                options = {"format": kind, "inputs": ["x", "label"], "outputs": ["double", "sum"]}
                with reader_of(
                    source, Fixed((teacher.address,)), RuntimeSettings(), teacher_batch_size=size, **options
                ) as reader:
                    items = list(reader)
                samples = items[0] if kind == "sample_list" else items
                columns = items[0] if kind == "batch" else [np.array(column) for column in zip(*samples, strict=True)]
                for column, values in zip(columns, (x, np.arange(10), *expected), strict=True):
                    np.testing.assert_array_equal(column, values)


def test_a_killed_teacher_s_work_is_done_by_another(settings: RuntimeSettings) -> None:
    """SIGKILL with requests in flight loses, repeats and reorders nothing, and stalls for less than two seconds."""
    batches = Batches(120, seconds=0.005)
    with (
        slow_teacher(settings) as first,
        slow_teacher(settings) as second,
        reader_of(batches, Discovered(POOL), settings) as reader,
    ):
        seen = []
        killed = False
        longest = 0.0
        last = time.monotonic()
        for batch in reader:
            seen.append(batch)
            if not killed and len(reader.stats().answered) == 2:
                first.process.kill()
                killed = True
            elif killed:
                longest = max(longest, time.monotonic() - last)
            last = time.monotonic()
        batches.check(seen)
        assert 0 < longest < 2
        assert reader.stats().answered[second.address] > 100


def test_a_teacher_that_hangs_is_not_waited_for(settings: RuntimeSettings) -> None:
    """What a stopped process was asked is asked of another as soon as its lease has run out."""
    batches = Batches(60, seconds=0.005)
    with (
        slow_teacher(settings) as first,
        slow_teacher(settings),
        reader_of(batches, Discovered(POOL), settings) as reader,
    ):
        seen = []
        begin = 0.0
        for batch in reader:
            seen.append(batch)
            if not begin and len(reader.stats().answered) == 2:
                first.process.send_signal(signal.SIGSTOP)
                begin = time.monotonic()
        batches.check(seen)
        assert begin
        assert time.monotonic() - begin < 5


def test_new_teachers_are_used_without_a_restart(settings: RuntimeSettings) -> None:
    """A pool that grows from one to three while the student reads gives each new one work within a second."""
    batches = Batches(10**6, seconds=0.002)
    with contextlib.ExitStack() as stack:
        stack.enter_context(slow_teacher(settings))
        reader = stack.enter_context(reader_of(batches, Discovered(POOL), settings))
        joined: dict[str, float] = {}
        starting: list[threading.Thread] = []

        def add() -> None:
            teacher = stack.enter_context(slow_teacher(settings))
            joined[teacher.address] = time.monotonic()

        for number, _ in enumerate(reader):
            if number == 0:
                starting = [threading.Thread(target=add), threading.Thread(target=add)]
                for thread in starting:
                    thread.start()
            answered = reader.stats().answered
            for address, since in list(joined.items()):
                if address in answered:
                    del joined[address]
                else:
                    assert time.monotonic() - since < 1.5, "a new teacher has no work"
            if len(answered) == 3:
                break
        for thread in starting:
            thread.join()
        assert reader.stats().teachers == 3


def test_a_teacher_that_leaves_is_not_missed(settings: RuntimeSettings) -> None:
    """SIGTERM drains: the reader goes on with the others, and nothing is lost."""
    batches = Batches(100, seconds=0.005)
    with slow_teacher(settings) as leaving, slow_teacher(settings):
        with reader_of(batches, Discovered(POOL), settings) as reader:
            seen = []
            for batch in reader:
                seen.append(batch)
                if len(seen) == 20:
                    leaving.terminate()
            batches.check(seen)
            wait_until(lambda: reader.stats().teachers == 1)
        assert leaving.process.wait(5) == 0


@pytest.mark.slow
def test_all_teachers_gone_is_a_pause(settings: RuntimeSettings) -> None:
    """The reader waits, goes on with whoever comes, and has lost nothing."""
    batches = Batches(40, seconds=0.005)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(slow_teacher(settings))
        reader = stack.enter_context(reader_of(batches, Discovered(POOL), settings))
        seen = []
        for batch in reader:
            seen.append(batch)
            if len(seen) == 10:
                first.process.kill()
                first.process.wait()
                stack.enter_context(slow_teacher(settings))
        batches.check(seen)


def test_nobody_in_the_pool_is_said(settings: RuntimeSettings) -> None:
    """The error names the pool and why there is nobody."""
    impatient = msgspec.structs.replace(settings, teacher_wait_s=0.4)
    reader = reader_of(Batches(1), Discovered("nobody"), impatient)
    with reader, pytest.raises(NoTeacherError, match=r"'nobody' after 0 s.*no teacher is registered"):
        list(reader)


@pytest.mark.slow
def test_training_goes_on_without_redis(tmp_path: Path, namespace: str) -> None:
    """Redis killed in the middle stops nobody, and its return is noticed: new teachers are used again."""
    batches = Batches(10**6, seconds=0.002)
    with RedisServer(tmp_path / "redis") as redis, contextlib.ExitStack() as stack:
        settings = RuntimeSettings(redis_url=redis.url, namespace=namespace, job="job", lease_ttl_s=1.0)
        stack.enter_context(slow_teacher(settings))
        reader = stack.enter_context(reader_of(batches, Discovered(POOL), settings))
        epoch = iter(reader)
        next(epoch)
        redis.kill()
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            begin = time.monotonic()
            next(epoch)
            assert time.monotonic() - begin < 1
        redis.start()
        stack.enter_context(slow_teacher(settings))
        begin = time.monotonic()
        while reader.stats().teachers < 2:
            next(epoch)
            assert time.monotonic() - begin < 5


def test_no_redis_at_the_start_is_said(tmp_path: Path) -> None:
    """The first iteration raises within seconds, and names the address; the reader can be closed."""
    with RedisServer(tmp_path / "redis") as redis:
        url, port = redis.url, redis.port
    begin = time.monotonic()
    reader = reader_of(Batches(1), Discovered(POOL), RuntimeSettings(redis_url=url))
    with reader, pytest.raises(RegistryUnavailableError, match=f"127.0.0.1:{port}"):
        list(reader)
    assert time.monotonic() - begin < 3


def test_a_reader_that_was_closed_before_its_start_starts_nothing(settings: RuntimeSettings) -> None:
    """Iterating it is the same error as ever: it looks for no teachers and registers no student."""
    reader = reader_of(Batches(1), Discovered(POOL), settings)
    reader.close()
    with pytest.raises(DistillError, match="closed"):
        list(reader)


def test_a_predictor_that_hangs_costs_little(settings: RuntimeSettings) -> None:
    """A teacher that says it is ready and answers nothing is asked once by each connection, then left alone."""
    settings = msgspec.structs.replace(settings, teacher_timeout_s=0.5)
    batches = Batches(200)
    with (
        running_teacher("served_models:slow") as hung,
        running_teacher("served_models:slow") as good,
        reader_of(batches, Fixed((hung.address, good.address)), settings) as reader,
    ):
        batches.check(list(reader))
        predictor = hung.predictor
        predictor.suspend()
        try:
            begin = time.monotonic()
            batches.check(list(reader))
            assert time.monotonic() - begin < 2.5
            assert reader.stats().teachers == 1
        finally:
            predictor.resume()  # so that it notices that its front is gone


def test_two_readers_share_the_pool(settings: RuntimeSettings) -> None:
    """Two students in one process get a teacher each, and their own batches."""
    batches = Batches(60, seconds=0.002)
    with slow_teacher(settings), slow_teacher(settings):
        wait_for_teachers(settings, 2)
        readers = [reader_of(batches, Discovered(POOL), settings) for _ in range(2)]
        with readers[0], readers[1]:
            for pair in zip(*readers, strict=True):
                np.testing.assert_array_equal(pair[0][1], pair[1][1])
            wait_until(lambda: [reader.stats().teachers for reader in readers] == [1, 1])
            for reader in readers:
                batches.check(list(reader))


def test_at_most_so_many_teachers_are_used(settings: RuntimeSettings) -> None:
    """A student that wants one teacher leaves the other alone."""
    reader = reader_of(Batches(30), Discovered(POOL, at_most=1), settings)
    with slow_teacher(settings), slow_teacher(settings), reader:
        wait_for_teachers(settings, 2)
        list(reader)
        assert reader.stats().teachers == 1


async def test_progress_is_published(settings: RuntimeSettings) -> None:
    """A job with fixed teachers, too, tells Redis how far it is; the last report is the final one."""
    settings = msgspec.structs.replace(settings, job="job")
    batches = Batches(20)
    with (
        running_teacher("served_models:slow") as teacher,
        reader_of(batches, Fixed((teacher.address,)), settings, total_steps=40) as reader,
    ):
        batches.check(list(reader))
        reader.report(loss=1.5, note="halfway")
    async with connect(settings.redis_url) as client:
        told = await progress.read(client, settings.namespace, "job")
    assert told is not None
    assert (told.step, told.total_steps, told.loss, told.note) == (20, 40, 1.5, "halfway")
    assert told.answered == {teacher.address: 40}
