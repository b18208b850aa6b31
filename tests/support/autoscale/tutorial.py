"""The three jobs of the original's tutorial, as large as the machine or cluster that they run on.

There, other load took 184m of 1000m of a CPU, the maximum load was 0.9, and trainers only consumed tasks of a queue.
Here they lease and acknowledge the shards of a ledger.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import pytest

from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.autoscale.rescale import rescale
from edl_runtime.backends.interface import Backend
from edl_runtime.monitor.snapshot import summary_row, take_snapshot
from edl_runtime.pods import Pod
from edl_runtime.settings import RuntimeSettings
from edl_runtime.shards.ledger import Ledger
from edl_runtime.specs import Bounds, JobSpec

if TYPE_CHECKING:
    from redis.asyncio import Redis

OTHER_LOAD, MAX_LOAD = 0.184, 0.9
SIZES = {"example": (Bounds(2, 10), 0.036), "example1": (Bounds(2, 8), 0.040), "example2": (Bounds(4, 4), 0.108)}
"""Bounds of each job, and the share of all CPUs that one trainer reserves."""

SHARDS = [str(number) for number in range(100_000)]
"""More than are consumed during the tests."""

TRAINER = """
import os, signal, time
from edl_runtime.settings import RuntimeSettings
from edl_runtime.shards.ledger import BlockingLedger
leaving = []
signal.signal(signal.SIGTERM, lambda *_: leaving.append(True))
settings = RuntimeSettings.from_env(os.environ)
worker = f"{settings.instance}/{os.urandom(4).hex()}"
shards = [str(number) for number in range(100_000)]
with BlockingLedger(settings.redis_url, settings.namespace, settings.job, worker=worker, shards=shards) as ledger:
    ledger.begin(1)
    print("consumes", flush=True)
    while not leaving and (leased := ledger.lease()):
        time.sleep(0.2)
        ledger.ack(leased, step=1)
"""
"""A trainer that consumes shards until SIGTERM, and then finishes its current one."""

WITHIN_S = 240.0
EVERY_S = 2.0


def spec(name: str, namespace: str, cpus: float) -> JobSpec:
    """Return a job of the tutorial, scaled to `cpus` CPUs."""
    bounds, share = SIZES[name]
    env = RuntimeSettings(namespace=namespace, job=name, lease_ttl_s=30.0).to_env()
    return JobSpec(
        name=name,
        kind="trainer",
        command=("python", "-c", TRAINER),
        bounds=bounds,
        instances=bounds.min,
        elastic=True,
        env=env,
        pod=Pod(resources={"cpu": f"{round(share * cpus * 1000)}m"}),
    )


class Tutorial:
    """Jobs that are submitted one by one, and a rescaling every two seconds until a number of trainers runs."""

    def __init__(self, backend: Backend, client: Redis, namespace: str, redis_url: str, rules: RescalingRules) -> None:
        self.backend = backend
        self.client = client
        self.namespace = namespace
        self.rules = rules
        self._secrets = {"EDL_REDIS_URL": redis_url}

    async def submit(self, spec: JobSpec) -> None:
        await self.ledger(spec.name).restore(None, 1)
        await self.backend.submit(spec, token="test/1", secrets=self._secrets)

    async def play(self, cpus: float, other_load: float) -> None:
        """Submit the three jobs and check their sizes; at the end no shard is unfinished."""
        try:
            await self._play(cpus, other_load)
        finally:
            for job in await self.backend.list():
                await self.backend.delete(job.name)
        for name in SIZES:
            consumed, unfinished = await self.consumed(name)
            assert consumed > 0
            assert unfinished == 0

    async def _play(self, cpus: float, other_load: float) -> None:
        """Submit the three jobs one after the other, and check the columns of `edl monitor`.

        With other load the third job is pending at first; processes start without room.
        """
        await self.submit(spec("example", self.namespace, cpus))
        await self.rescale_until(lambda running: running == {"example": 10})
        assert await self.shows(1, 0, "example:10") == pytest.approx(other_load + 0.36, abs=0.001)
        await self.submit(spec("example1", self.namespace, cpus))
        await self.rescale_until(lambda running: running == {"example": 10, "example1": 8})
        assert await self.shows(2, 0, r"example:10\|example1:8") == pytest.approx(other_load + 0.68, abs=0.001)
        await self.submit(spec("example2", self.namespace, cpus))
        if other_load:
            await self.shows(3, 1, r"example:10\|example1:8\|example2:[0-3]")
        await self.rescale_until(_the_third_has_joined)
        use = await self.shows(3, 0, r"example:[34]\|example1:[34]\|example2:4")
        assert other_load + 0.6 < use <= other_load + MAX_LOAD - OTHER_LOAD

    async def shows(self, submitted: int, pending: int, trainers: str) -> float:
        """Wait for a line with these jobs and trainers (a pattern); return the reserved share of CPUs."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            line = "\t".join(summary_row(await take_snapshot(self.backend, self.client, self.namespace)))
            found = re.match(rf"{submitted}\t{pending}\t{trainers}\t([\d.]+)%", line)
            if found:
                return float(found[1]) / 100
            assert time.monotonic() < deadline, line
            await asyncio.sleep(0.5)

    async def running(self) -> dict[str, int]:
        """Return the number of running trainers of each job."""
        jobs = await self.backend.list()
        return {job.name: sum(one.phase == "running" for one in job.instances) for job in jobs}

    async def rescale_until(self, holds: Callable[[Mapping[str, int]], bool]) -> dict[str, int]:
        """Rescale until a condition holds for the running trainers and a rescaling changes nothing."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            done = await rescale(self.backend, self.client, self.namespace, self.rules)
            running = await self.running()
            if holds(running) and not done.plan.changes:
                return running
            assert time.monotonic() < deadline, (running, done.plan)
            await asyncio.sleep(EVERY_S)

    async def consumed(self, name: str) -> tuple[int, int]:
        """Return how many shards of a job are consumed, and how many are in progress."""
        report = await self.ledger(name).report()
        return report.acked + report.done, report.doing

    def ledger(self, name: str) -> Ledger:
        return Ledger(self.client, self.namespace, name, worker="test", shards=SHARDS)


def _the_third_has_joined(running: Mapping[str, int]) -> bool:
    """Whether the others have shrunk for it."""
    return running.get("example2") == 4 and {running["example"], running["example1"]} <= {3, 4}
