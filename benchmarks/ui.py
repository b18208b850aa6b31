"""What the page in the Airflow UI costs the API server, with many jobs, for an admin and for who sees a tenth of them.

    python benchmarks/ui.py --json

Its app is asked as Airflow's API server asks it, compressed by the same middleware, with Airflow's own login and
permissions, a database, and a real Redis with a day's history; jobs and their reports are made up. Must, with 500 jobs
of 4 instances each: a poll of any kind costs at most 20 ms of CPU, and the page is usable within a second: "first_s"
is the time for its files and the first overview. Exit status 1 if one is missed.

"overview" is a poll between two snapshots, which is without a body; all others are the first ones after a snapshot,
which is made once for all viewers: "snapshot" is what that costs, while somebody looks each two seconds, with 500 jobs
each five. "timeline_first" is the one that reads the day; it is no poll.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import pkgutil
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock
from urllib.parse import urlsplit

os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="edl-benchmark-airflow-"))
os.environ.setdefault("AIRFLOW__API_AUTH__JWT_SECRET", "s" * 64)

import httpx
import msgspec
from _flags import at_least_1

from edl_runtime.autoscale.history import MOST_BYTES, HistoryPoint, history_point
from edl_runtime.backends.interface import Capacity, InstanceStatus, JobStatus, LogLine, NodeCapacity, Scaling
from edl_runtime.progress import Progress, publish_progress
from edl_runtime.specs import Bounds
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

if TYPE_CHECKING:
    from edl_airflow.plugin.viewers import Kept

DAGS = 50
SEEN = frozenset(f"dag-{number}" for number in range(DAGS // 10))
"""The DAGs of the restricted user."""

POOLS = 5
LOG_LINES = 5_000
MOST_POLL_MS = 20.0
MOST_FIRST_S = 1.0
NAMESPACE = "benchmark-ui"
MINUTE_MS = 60_000
USERS = ("admin", "restricted")
PAGE = ("", "static/edl.js", "static/edl.css", "static/overview.js", "static/tables.js", "static/uPlot.iife.min.js")


class Jobs:
    """A backend of running jobs, and some pools, that are only said to run."""

    def __init__(self, jobs: int, instances: int) -> None:
        now = time.time() - 25 * 3600
        there = tuple(
            InstanceStatus(index=index, phase="running", started_at=now, node="node") for index in range(instances)
        )
        scaling = Scaling(bounds=Bounds(1, 8), resources={"cpu": 1.0}, resumes=True)
        self.jobs = [
            JobStatus(
                name=f"job-{number:04}", kind="trainer", phase="running", token=f"dag-{number % DAGS}/job-{number}/1",
                digest="", wanted=instances, scaling=scaling, instances=there, created_at=now, elastic=True,
                reason=f"0/{number} nodes have room for another",
            )
            for number in range(jobs)
        ]  # fmt: skip
        for number in range(0, jobs, -(-jobs // POOLS)):
            self.jobs[number] = msgspec.structs.replace(self.jobs[number], kind="pool", elastic=False)
        self._by_name = {job.name: job for job in self.jobs}

    @property
    def place(self) -> str:
        return "benchmark"

    async def list(self) -> list[JobStatus]:
        return self.jobs

    async def get(self, name: str) -> JobStatus:
        return self._by_name[name]

    async def owner(self, name: str) -> str:
        return self._by_name[name].token.rpartition("/")[0]

    async def capacity(self) -> Capacity:
        has = {"cpu": 4096.0, "memory": 2.0**43}
        return Capacity(nodes=(NodeCapacity(name="node", total=has, free=has),))

    async def logs(self, _: str, **__: Any) -> AsyncIterator[LogLine]:
        for number in range(LOG_LINES):
            yield LogLine(number % 4, f"step {number} loss 0.123 samples/s 1234.5")
        await asyncio.Event().wait()


def airflow(folder: Path) -> Any:
    """Make Airflow's tables, and an auth manager whose viewers may see few DAGs; return that."""
    from airflow import models, settings
    from airflow.api_fastapi import app
    from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
    from airflow.models.base import Base
    from sqlalchemy import create_engine
    from sqlalchemy.orm import scoped_session, sessionmaker

    class Manager(SimpleAuthManager):
        def is_authorized_dag(self, *, user: Any, details: Any = None, **given: Any) -> bool:
            may = user.role == "ADMIN" or (details is not None and details.id in SEEN)
            return may and super().is_authorized_dag(user=user, details=details, **given)

        def is_authorized_view(self, *, user: Any, **_: Any) -> bool:
            return bool(user.role == "ADMIN")

    for module in pkgutil.iter_modules(models.__path__, "airflow.models."):
        importlib.import_module(module.name)
    engine = create_engine(f"sqlite:///{folder}/airflow.db")
    Base.metadata.create_all(engine)
    settings.Session = scoped_session(sessionmaker(engine, expire_on_commit=False))
    app._AuthManagerState.instance = manager = Manager()  # type: ignore[no-untyped-call] # noqa: SLF001
    return manager


def tokens(manager: Any) -> dict[str, dict[str, str]]:
    """Return the headers of each user's requests."""
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

    users = [
        SimpleAuthManagerUser(username=name, role=role) for name, role in zip(USERS, ("ADMIN", "USER"), strict=True)
    ]
    return {user.get_name(): {"Authorization": f"Bearer {manager.generate_jwt(user)}"} for user in users}


async def remember(redis_url: str, backend: Jobs) -> None:
    """Let the history of a day be there, as much as Redis keeps of it."""
    point: HistoryPoint = history_point(backend.jobs, await backend.capacity(), None)
    content = msgspec.json.encode(point)
    count = min(24 * 60, MOST_BYTES // len(content))
    now_ms = int(time.time() * 1000)
    async with connect(redis_url) as client, client.pipeline() as later:
        for number in range(count, 0, -1):
            entry = {"point": content.replace(b'"running":4', b'"running":%d' % (number % 4 + 1))}
            later.xadd(keys.history(NAMESPACE, backend.place), entry, id=f"{now_ms - number * MINUTE_MS}-0")  # type: ignore[arg-type]
        await later.execute()


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


async def changed(kept: Kept, version: str) -> None:
    """Wait for another snapshot."""
    for _ in range(1000):
        if (await kept.seen("edl_default")).version != version:
            return
        await asyncio.sleep(0.05)


class Viewer:
    """A user's page: asks as the browser does, with the tags of the last answers."""

    def __init__(self, client: httpx.AsyncClient, name: str, headers: dict[str, str]) -> None:
        self.name = name
        self._client = client
        self._headers = headers
        self._tags: dict[str, str] = {}
        self.taken: dict[str, list[float]] = {}

    async def ask(self, path: str, what: str = "") -> httpx.Response:
        """Return the answer; keep the CPU seconds that it took as those of `what`."""
        headers = {**self._headers, "If-None-Match": self._tags.get(path, "")}
        cpu = time.process_time()
        answer = await self._client.get(path, headers=headers)
        if what:
            self.taken.setdefault(what, []).append(time.process_time() - cpu)
        assert answer.status_code in (200, 304), (path, answer.status_code, answer.text[:200])
        self._tags[path] = answer.headers["etag"]
        return answer


async def measure(backend: Jobs, redis_url: str, manager: Any, rounds: int) -> dict[str, float]:
    """Return the CPU time of polls and a snapshot, in ms, and of the first answers, in s, by user."""
    from fastapi.middleware.gzip import GZipMiddleware

    from edl_airflow.plugin import live
    from edl_airflow.plugin.app import make_app

    @asynccontextmanager
    async def opened(_: object) -> AsyncIterator[Jobs]:
        yield backend

    found: dict[str, float] = {}
    with (
        mock.patch("edl_airflow.client.watching_backend", opened),
        mock.patch.object(live, "every_s", return_value=3600.0),  # snapshots are asked for here
    ):
        await report(redis_url, backend.jobs, 1)
        for _ in range(2):  # the first one imports, and fills the caches of libraries, as an API server's start does
            page = make_app()
            app = GZipMiddleware(page, minimum_size=1024, compresslevel=5)  # as Airflow's
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://airflow.example") as client:
                viewers = [Viewer(client, name, headers) for name, headers in tokens(manager).items()]
                for viewer in viewers:
                    found |= await _first_answers(viewer, backend)
                kept = page.state.edl
                snapshots = await _polls(kept, viewers, backend, redis_url, rounds)
    found["snapshot_cpu_ms"] = _middle_ms(snapshots)
    for viewer in viewers:
        found |= {f"{viewer.name}_{what}_cpu_ms": _middle_ms(taken) for what, taken in viewer.taken.items()}
    return found


async def _first_answers(viewer: Viewer, backend: Jobs) -> dict[str, float]:
    began = time.perf_counter()
    for path in PAGE:
        await viewer.ask(f"/{path}")
    first = await viewer.ask("/api/overview")
    usable_s = time.perf_counter() - began
    seen = first.json()
    own = [job for job in backend.jobs if viewer.name == "admin" or _is_seen(job)]
    assert len(seen["jobs"]) + len(seen["pools"]) == len(own)
    began = time.perf_counter()
    await viewer.ask("/api/timeline")
    took = {"first_s": usable_s, "timeline_first_s": time.perf_counter() - began, "bytes": float(len(first.content))}
    return {f"{viewer.name}_{what}": value for what, value in took.items()}


async def _polls(kept: Kept, viewers: list[Viewer], backend: Jobs, redis_url: str, rounds: int) -> list[float]:
    """Let all viewers poll after each of some snapshots; return the CPU seconds of those."""
    job, pool = (next(each.name for each in backend.jobs if each.kind == kind and _is_seen(each)) for kind in _KINDS)
    log = {viewer.name: f"/api/log?job={job}" for viewer in viewers}
    snapshots = []
    for number in range(rounds):
        await report(redis_url, backend.jobs, number + 2)
        version = (await kept.seen("edl_default")).version
        cpu = time.process_time()
        kept.reader("edl_default").read_now()
        await changed(kept, version)
        snapshots.append(time.process_time() - cpu)
        for viewer in viewers:
            await viewer.ask("/api/overview", "overview_changed")
            assert (await viewer.ask("/api/overview", "overview")).status_code == 304
            await viewer.ask(f"/api/job?job={job}", "job")
            await viewer.ask(f"/api/pool?pool={pool}", "pool")
            await viewer.ask("/api/timeline", "timeline")
            answer = await viewer.ask(log[viewer.name], "log" if number else "")
            if not number:
                log[viewer.name] += f"&cursor={answer.json()['cursor']}"
    return snapshots


_KINDS = ("trainer", "pool")


def _is_seen(job: JobStatus) -> bool:
    """Whether the restricted user sees a job."""
    return job.token.split("/")[0] in SEEN


def _middle_ms(taken: list[float]) -> float:
    return sorted(taken)[len(taken) // 2] * 1000


def most(name: str) -> float | None:
    """Return the limit of a figure, None for none."""
    if name.endswith("_cpu_ms") and name != "snapshot_cpu_ms":
        return MOST_POLL_MS
    return MOST_FIRST_S if name.endswith("_first_s") and "timeline" not in name else None


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
        backend = Jobs(options.jobs, options.instances)
        manager = airflow(Path(folder))
        asyncio.run(remember(redis.url, backend))
        found = asyncio.run(measure(backend, redis.url, manager, options.rounds))
    missed = [name for name, value in found.items() if (limit := most(name)) and value > limit]
    for name, value in found.items():
        print(f"{name:34} {value:10.2f}{'  missed' if name in missed else ''}")
    if options.json:
        print(json.dumps(found))
    if missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
