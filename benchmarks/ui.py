"""What the page in the Airflow UI costs the API server, with many jobs.

    python benchmarks/ui.py --json

Its app is asked as Airflow's API server asks it, compressed by the same middleware, with a real Redis; jobs, their
reports and an admin's rights are made up. Must, with 500 jobs of 4 instances each: a poll costs at most 20 ms of CPU,
and the first answer comes within a second. Exit status 1 if one is missed. "unchanged" is a poll between two snapshots,
"changed" the first one after a new snapshot, which is made once for all viewers; "snapshot" is what that costs, while
somebody looks each two seconds, with 500 jobs each five.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="edl-benchmark-airflow-"))

import httpx
from _flags import at_least_1

from edl_airflow.plugin.live import LiveReader
from edl_runtime.backends.interface import Capacity, InstanceStatus, JobStatus, NodeCapacity, Scaling
from edl_runtime.progress import Progress, publish_progress
from edl_runtime.specs import Bounds
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

DAGS = 50
MOST_POLL_MS = 20.0
MOST_FIRST_S = 1.0
NAMESPACE = "benchmark-ui"


class Jobs:
    """A backend of running jobs that are only said to run."""

    def __init__(self, jobs: int, instances: int) -> None:
        now = time.time() - 3600
        there = tuple(
            InstanceStatus(index=index, phase="running", started_at=now, node="node") for index in range(instances)
        )
        scaling = Scaling(bounds=Bounds(1, 8), resources={"cpu": 1.0}, resumes=True)
        self.jobs = [
            JobStatus(
                name=f"job-{number:04}", kind="trainer", phase="running", token=f"dag-{number % DAGS}/job-{number}/1",
                digest="", wanted=instances, scaling=scaling, instances=there, created_at=now, elastic=True,
            )
            for number in range(jobs)
        ]  # fmt: skip

    async def list(self) -> list[JobStatus]:
        return self.jobs

    async def capacity(self) -> Capacity:
        has = {"cpu": 4096.0, "memory": 2.0**43}
        return Capacity(nodes=(NodeCapacity(name="node", total=has, free=has),))


async def report(redis_url: str, jobs: list[JobStatus], step: int) -> None:
    """Let each job have trained until this step."""
    async with connect(redis_url) as client:
        told = [
            Progress(
                step=step, total_steps=10_000, updated_at=time.time(), loss=1 / step, metrics={"accuracy": 0.5},
                samples_per_s=1234.5, time_left_s=60.0, waiting=0.1, busy=0.9, teachers=2, instances=4, limit="student",
            )
            for _ in jobs
        ]  # fmt: skip
        for job, one in zip(jobs, told, strict=True):
            await publish_progress(client, NAMESPACE, job.name, one)


async def changed(reader: LiveReader, version: str) -> None:
    """Wait for another snapshot."""
    for _ in range(1000):
        if (await reader.seen()).version != version:
            return
        await asyncio.sleep(0.05)


async def measure(redis_url: str, jobs: int, instances: int, rounds: int) -> dict[str, float]:
    """Return the CPU time of polls and a snapshot, in ms, and the time of the first answer, in s."""
    from fastapi.middleware.gzip import GZipMiddleware

    from edl_airflow.plugin import access, airflow_state, live
    from edl_airflow.plugin.app import make_app
    from edl_airflow.plugin.rights import Rights

    backend = Jobs(jobs, instances)
    dags = frozenset({"", *(f"dag-{number}" for number in range(DAGS))})
    rights = Rights(sees=dags, reads_log=dags, changes=dags, cluster=True)
    user = mock.Mock(get_id=lambda: "1")

    @asynccontextmanager
    async def opened(_: object) -> AsyncIterator[Jobs]:
        yield backend

    async def user_of(_: object) -> Any:
        return user

    app = GZipMiddleware(make_app(), minimum_size=1024, compresslevel=5)  # as Airflow's
    with (
        mock.patch("edl_airflow.client.watching_backend", opened),
        mock.patch.object(access, "user_of", user_of),
        mock.patch.object(access, "rights_of", return_value=rights),
        mock.patch.object(airflow_state, "edl_connections", return_value=["edl_default"]),
        mock.patch.object(live, "tasks_of_tries", return_value={}),
        mock.patch.object(live, "every_s", return_value=3600.0),  # snapshots are asked for here
    ):
        await report(redis_url, backend.jobs, 1)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://airflow.example") as client:
            found: dict[str, list[float]] = {"unchanged": [], "changed": [], "snapshot": []}
            began = time.perf_counter()
            first = await client.get("/api/overview")
            first_s = time.perf_counter() - began
            assert first.status_code == 200, first.text
            assert len(first.json()["jobs"]) == jobs
            inner = app.app.state.edl
            reader = inner.reader("edl_default")
            etag = first.headers["etag"]
            for number in range(rounds):
                await report(redis_url, backend.jobs, number + 2)
                version = (await reader.seen()).version
                cpu = time.process_time()
                reader.read_now()
                await changed(reader, version)
                found["snapshot"].append(time.process_time() - cpu)
                for what in ("changed", "unchanged"):
                    cpu = time.process_time()
                    answer = await client.get("/api/overview", headers={"If-None-Match": etag})
                    found[what].append(time.process_time() - cpu)
                    assert answer.status_code == (200 if what == "changed" else 304), answer.text[:200]
                    etag = answer.headers["etag"]
    middle = {name: sorted(taken)[len(taken) // 2] * 1000 for name, taken in found.items()}
    return {
        "first_s": first_s,
        "bytes": float(len(first.content)),
        **{f"{name}_cpu_ms": ms for name, ms in middle.items()},
    }


def main() -> None:
    """Measure, print, and exit with 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=at_least_1, default=500)
    parser.add_argument("--instances", type=at_least_1, default=4, help="of each job")
    parser.add_argument("--rounds", type=at_least_1, default=20)
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of libraries that Airflow imports
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as redis:
        given = {"conn_type": "edl", "host": "127.0.0.1", "port": redis.port, "extra": {"namespace": NAMESPACE}}
        given["password"] = urlsplit(redis.url).password
        os.environ["AIRFLOW_CONN_EDL_DEFAULT"] = json.dumps(given)
        found = asyncio.run(measure(redis.url, options.jobs, options.instances, options.rounds))
    for name, value in found.items():
        print(f"{name:18} {value:10.2f}")
    if options.json:
        print(json.dumps(found))
    if found["first_s"] > MOST_FIRST_S or max(found["changed_cpu_ms"], found["unchanged_cpu_ms"]) > MOST_POLL_MS:
        sys.exit(1)


if __name__ == "__main__":
    main()
