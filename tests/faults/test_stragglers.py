"""An instance on a slow machine: its processes are stopped and continued in turns, from outside."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from support.elastic.agent_group import running_group

from edl_runtime.backends.interface import JobStatus
from edl_runtime.elastic.agent.watchdog import STOPPED_WAIT_S
from edl_runtime.monitor.reports import read_reports
from edl_runtime.monitor.snapshot import JobLine, job_line
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextlib.contextmanager
def throttled(*processes: psutil.Process, stopped_s: float, running_s: float = 0.05) -> Iterator[None]:
    """Stop and continue these processes in turns, until the end of the block or theirs."""
    over = threading.Event()

    def each(call: Callable[[psutil.Process], None]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                call(process)

    def alternate() -> None:
        while not over.wait(running_s):
            each(psutil.Process.suspend)
            over.wait(stopped_s)
            each(psutil.Process.resume)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def monitored(settings: RuntimeSettings) -> JobLine:
    """Return the job's line in the monitor."""

    async def read() -> JobLine:
        job = JobStatus(
            name=settings.job,
            kind="trainer",
            phase="running",
            token="",
            digest="",
            wanted=3,
            created_at=0.0,
            elastic=True,
        )
        async with connect(settings.redis_url) as client:
            return job_line(job, (await read_reports(client, settings.namespace, [job]))[job.name])

    return asyncio.run(read())


def test_an_instance_that_is_slowed_from_outside_is_a_straggler_until_it_is_not(
    tmp_path: Path, settings: RuntimeSettings
) -> None:
    """In events and in the monitor, and none of the others is. Nothing is lost or started again for it."""
    settings = msgspec.structs.replace(settings, job="training", straggler_after_s=2.0)
    with running_group(tmp_path / "out", settings, samples=10**6, global_batch=24, epochs=1, step_s=0.05) as group:
        group.start(0, 1, 2)
        group.await_generation(0, 1, 2)
        group.await_steps(20)
        with throttled(psutil.Process(group.agents[1].pid), group.trainer(1), stopped_s=0.15):
            named = group.await_event("straggler")
            assert named.instance == 1
            lines: list[JobLine] = []

            def is_told() -> bool:
                lines.append(monitored(settings))
                return lines[-1].trouble.startswith("instance 1 computes ")

            group.await_condition(is_told, "a straggler in the monitor")
            line = lines[-1]
            assert list(line.stragglers) == [1]
            assert line.stragglers[1] >= settings.straggler_factor
        group.await_condition(lambda: not monitored(settings).stragglers, "no straggler any more")
        group.await_steps(20)
        assert {event.instance for event in group.events() if event.kind == "straggler"} == {1}, group.history()
        assert not [event for event in group.events() if event.kind in ("failed", "lost", "gone")], group.history()


@pytest.mark.deep
def test_a_trainer_that_is_throttled_makes_others_wait_and_lives(tmp_path: Path, settings: RuntimeSettings) -> None:
    """They wait for longer than for one that is stopped, and each look at it may find it stopped; but it runs."""
    settings = msgspec.structs.replace(settings, job="training", lease_ttl_s=30.0)
    heavy = {"samples": 10**6, "global_batch": 48, "micro_batch": 1, "epochs": 1}
    with running_group(tmp_path / "out", settings, **heavy) as group:
        group.start(0, 1)
        group.await_generation(0, 1)
        group.await_steps(5)

        def longest_s() -> float:
            at = [each["at"] for each in group.stepped() if each["rank"] == 0]
            return float(max(after - before for before, after in itertools.pairwise(at)))

        with throttled(group.trainer(1), stopped_s=0.9):
            group.await_condition(lambda: longest_s() > 2 * STOPPED_WAIT_S, "a long step")
            group.await_steps(1)
        assert not [event for event in group.events() if event.kind == "failed"], group.history()
