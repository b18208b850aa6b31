"""DistillReader with real teachers: `edl teacher` processes, sockets, Redis."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.students.readers import POOL, Batches, reader_of, slow_teacher, wait_for_teachers
from support.teachers.process import running_teacher, wait_until

from edl_runtime import progress
from edl_runtime.distill import Discovered, Fixed
from edl_runtime.errors import DistillError, NoTeacherError, RegistryUnavailableError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.client import connect
from edl_runtime.store.server import RedisServer


def test_all_three_formats_with_a_real_teacher() -> None:
    """What goes over the wire comes back at its place, in every format and with every size of request."""
    x = np.arange(10 * 4, dtype=np.float32).reshape(10, 4)
    expected = x * 2, x.sum(axis=1)
    sources: dict[str, list[Any]] = {
        "sample": [(row, number) for number, row in enumerate(x)],
        "sample_list": [[(row, number) for number, row in enumerate(x)]],
        "batch": [(x, np.arange(10))],
    }
    with running_teacher("support.models:arithmetic") as teacher:
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


def test_nobody_in_the_pool_is_said(settings: RuntimeSettings) -> None:
    """The error names the pool and why there is nobody."""
    impatient = msgspec.structs.replace(settings, teacher_wait_s=0.4)
    reader = reader_of(Batches(1), Discovered("nobody"), impatient)
    with reader, pytest.raises(NoTeacherError, match=r"'nobody' after \d+ s.*no teacher is registered"):
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
            assert time.monotonic() - begin < 5
        redis.start()
        stack.enter_context(slow_teacher(settings))
        begin = time.monotonic()
        while reader.stats().teachers < 2:
            next(epoch)
            assert time.monotonic() - begin < 20


def test_no_redis_at_the_start_is_said(tmp_path: Path) -> None:
    """The first iteration raises within seconds, and names the address; the reader can be closed."""
    with RedisServer(tmp_path / "redis") as redis:
        url, port = redis.url, redis.port
    begin = time.monotonic()
    reader = reader_of(Batches(1), Discovered(POOL), RuntimeSettings(redis_url=url))
    with reader, pytest.raises(RegistryUnavailableError, match=f"127.0.0.1:{port}"):
        list(reader)
    assert time.monotonic() - begin < 10


def test_a_reader_that_was_closed_before_its_start_starts_nothing(settings: RuntimeSettings) -> None:
    """Iterating it is the same error as ever: it looks for no teachers and registers no student."""
    reader = reader_of(Batches(1), Discovered(POOL), settings)
    reader.close()
    with pytest.raises(DistillError, match="closed"):
        list(reader)


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
        running_teacher("support.models:slow") as teacher,
        reader_of(batches, Fixed((teacher.address,)), settings, total_steps=40) as reader,
    ):
        batches.check(list(reader))
        reader.report(loss=1.5, note="halfway")
    async with connect(settings.redis_url) as client:
        told = await progress.read(client, settings.namespace, "job")
    assert told is not None
    assert (told.step, told.total_steps, told.loss, told.note) == (20, 40, 1.5, "halfway")
    assert told.answered == {teacher.address: 40}
