"""What real teachers and students report of each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.registry.discovery_process import running_discovery
from support.registry.followers import behind
from support.students.readers import POOL, Batches, reader_of, slow_teacher
from support.teachers.process import PATIENCE_S, running_teacher

from edl_runtime.distill import Discovered, DistillReader
from edl_runtime.pool_reports import PoolDemand
from edl_runtime.registry.demands import demands
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.client import connect

BATCHES = Batches(10**6, seconds=0.02)
LONG_ENOUGH_S = 3.0


def look(settings: RuntimeSettings, *pools: str) -> list[PoolDemand]:
    """Return what is reported to these pools."""

    async def ask() -> dict[str, PoolDemand]:
        async with connect(settings.redis_url) as client:
            return await demands(client, settings.namespace, pools)

    return list(asyncio.run(ask()).values())


def read_until_reported(batches: Iterator[Any], settings: RuntimeSettings, *pools: str) -> list[PoolDemand]:
    """Take batches until all members have reported of some seconds; return what."""
    begin = looked_at = time.monotonic()
    for _ in batches:
        if time.monotonic() - looked_at < 0.5:
            continue
        found = look(settings, *pools)
        reports = [report for pool in found for report in (*pool.teachers.values(), *pool.students.values())]
        if all(report is not None and report.over_s >= LONG_ENOUGH_S for report in reports):
            return found
        looked_at = time.monotonic()
        assert looked_at - begin < PATIENCE_S, reports
    raise AssertionError("the source is endless")


@pytest.mark.slow
@pytest.mark.parametrize("by_endpoint", [False, True])
def test_a_student_that_only_waits_and_its_teacher_say_so(settings: RuntimeSettings, *, by_endpoint: bool) -> None:
    """With a beat of either, in Redis or behind a discovery endpoint."""
    with slow_teacher(settings, "--max_batch", "1"), running_discovery(settings) as endpoint:
        mine = behind(endpoint.url, settings) if by_endpoint else settings
        with reader_of(BATCHES, Discovered(POOL, at_most=2), mine) as reader:
            [pool] = read_until_reported(iter(reader), settings, POOL)
    [load], [student] = pool.teachers.values(), pool.students.values()
    assert load is not None
    assert student is not None
    assert load.busy * load.over_s > 0.9 * student.over_s  # it was there before
    assert student.waiting > 0.7
    assert 0.9 < student.asked <= 1.01
    assert (student.teachers, student.want) == (1, 2)
    assert 100 < student.samples_per_s <= 201  # 4 rows in 20 ms


@pytest.mark.slow
def test_each_pool_of_a_mixture_hears_how_long_it_is_waited_for(settings: RuntimeSettings) -> None:
    """The one that answers at once is not the one that the student waits for."""
    with (
        running_teacher("support.models:slow", "--pool", "slow", env=settings.to_env()),
        running_teacher("support.models:arithmetic", "--pool", "fast", env=settings.to_env()),
        DistillReader(
            BATCHES,
            inputs=["x"],
            teachers={"slow": Discovered("slow"), "fast": Discovered("fast")},
            outputs={"slow": ["double"], "fast": ["sum"]},
            settings=settings,
        ) as reader,
    ):
        slow, fast = read_until_reported(iter(reader), settings, "slow", "fast")
    assert slow.busy is not None
    assert fast.busy is not None
    assert slow.waiting is not None
    assert fast.waiting is not None
    assert slow.waiting > 0.7
    assert fast.waiting < 0.3
    assert fast.busy < 0.5 < slow.busy
