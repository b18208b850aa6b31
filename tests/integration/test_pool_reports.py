"""What real teachers and students report of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from support.registry.discovery_process import running_discovery
from support.registry.followers import discovery_settings
from support.students.readers import POOL, ROWS, Batches, reader_of, slow_teacher
from support.teachers.process import PATIENCE_S, running_teacher

from edl_runtime.distill import Discovered, DistillReader
from edl_runtime.pool_reports import PoolDemand
from edl_runtime.registry.pools import read_demands
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

ANSWER_S = 0.5
"""Beside which little counts that a busy machine adds."""

BATCHES = Batches(10**6, seconds=ANSWER_S)
LONG_ENOUGH_S = 1.5


@pytest.fixture
def settings(settings: RuntimeSettings) -> RuntimeSettings:
    """Leases that do not run out however busy the machine is: who registers anew has said nothing yet."""
    return msgspec.structs.replace(settings, lease_ttl_s=600.0)


Holds = Callable[[list[PoolDemand]], bool]


def look(settings: RuntimeSettings, holds: Holds, *pools: str) -> list[PoolDemand]:
    """Return what is reported to these pools, as soon as all members have reported of some seconds, and that `holds`.

    A report may be of a time without a student, or in which the machine stood still, too; those after it are not.
    """

    async def ask() -> list[PoolDemand]:
        async with connect(settings.redis_url) as client, asyncio.timeout(PATIENCE_S):
            while True:
                found = list((await read_demands(client, settings.namespace, pools)).values())
                reports = [report for pool in found for report in (*pool.teachers.values(), *pool.students.values())]
                if (
                    all(pool.teachers and pool.students for pool in found)
                    and all(report is not None and report.over_s >= LONG_ENOUGH_S for report in reports)
                    and holds(found)
                ):
                    return found
                await asyncio.sleep(0.1)

    return asyncio.run(ask())


def read_until_reported(
    batches: Iterator[Any], settings: RuntimeSettings, holds: Holds, *pools: str
) -> list[PoolDemand]:
    """Take batches and nothing else until all has been reported; return what."""
    with ThreadPoolExecutor(1) as aside:
        found = aside.submit(look, settings, holds, *pools)
        while not found.done():
            next(batches)
        return found.result()


def waits_for_its_teacher(found: list[PoolDemand]) -> bool:
    [pool] = found
    return (pool.busy or 0) > 0.5 and (pool.waiting or 0) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("by_endpoint", [True, pytest.param(False, marks=pytest.mark.deep)])
def test_a_waiting_student_and_its_teacher_report_it(settings: RuntimeSettings, *, by_endpoint: bool) -> None:
    """With a beat of either, in Redis or behind a discovery endpoint."""
    with slow_teacher(settings, "--max-batch", "1"), running_discovery(settings) as endpoint:
        mine = discovery_settings(endpoint.url, settings) if by_endpoint else settings
        with reader_of(BATCHES, Discovered(POOL, at_most=2), mine) as reader:
            [pool] = read_until_reported(iter(reader), settings, waits_for_its_teacher, POOL)
    [load], [student] = pool.teachers.values(), pool.students.values()
    assert load is not None
    assert student is not None
    assert 0.5 < student.asked <= 1.01
    assert (student.teachers, student.want) == (1, 2)
    assert 0 < student.samples_per_s <= 4 / ANSWER_S + ROWS / LONG_ENOUGH_S  # 4 rows an answer, and a batch at hand


@pytest.mark.slow
@pytest.mark.deep
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
        read_until_reported(iter(reader), settings, waits_for_the_slow_one, "slow", "fast")


def waits_for_the_slow_one(found: list[PoolDemand]) -> bool:
    slow, fast = found
    if None in (slow.busy, fast.busy, slow.waiting, fast.waiting):
        return False
    return fast.waiting < 0.5 < slow.waiting and fast.busy < slow.busy  # type: ignore[operator]
