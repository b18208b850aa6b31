"""What Redis has to keep and to answer for jobs, instances, teachers and students; and what is left of ended jobs.

    python benchmarks/redis_use.py
    python benchmarks/redis_use.py --json --jobs 100 --seconds 2

In a Redis of its own. Commands a second are the scripts and blocking reads that clients ask for in `--seconds`: of real
agents (`edl agent` with a script that sleeps), of teachers and students as the registry's own code registers them, and
which report each second. Bytes are those of MEMORY USAGE.

Then `--jobs` jobs one after the other do what a job's agents and trainers do to Redis: register, form a generation,
lease and finish shards, report progress, announce a checkpoint, end. Each key has to expire by itself; `kept_bytes` is
what remains once all have, as after 30 days.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from _flags import at_least_1
from redis.asyncio import Redis

from edl_runtime.checkpoint import checkpoint_events
from edl_runtime.checkpoint.checkpoint_events import SavedCheckpoint
from edl_runtime.discovery.assignments import StudentRegistry
from edl_runtime.elastic.rendezvous.generation import Generation, JobOutcome, TrainerMember
from edl_runtime.elastic.rendezvous.redis_store import RendezvousStore, follow_events
from edl_runtime.pool_reports import StudentReport, TeacherReport
from edl_runtime.progress import Progress, publish_progress
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.settings import RuntimeSettings
from edl_runtime.shards.ledger import Ledger
from edl_runtime.store.keys import Service
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

NAMESPACE = "benchmark"
SHARDS = [f"s3://bucket/folder/part-{number:06}.parquet" for number in range(4)]
FEW, MANY = 2, 10


async def commands(client: Redis) -> int:
    """Return how many scripts and blocking reads Redis was asked for: nearly all that clients send."""
    return sent_by_clients(await client.info("commandstats"))


def sent_by_clients(stats: dict[str, Any]) -> int:
    """Return the number of these commands by what INFO says, which also counts those inside scripts."""
    return sum(int(stats[f"cmdstat_{name}"]["calls"]) for name in ("evalsha", "xread") if f"cmdstat_{name}" in stats)


async def rate(client: Redis, seconds: float) -> float:
    """Return the commands a second."""
    before = await commands(client)
    await asyncio.sleep(seconds)
    return round((await commands(client) - before) / seconds, 1)


async def memory(client: Redis) -> dict[str, int]:
    """Return the bytes of all keys by the last words of their names."""
    found: Counter[str] = Counter()
    async for key in client.scan_iter("edl:*", count=1000):
        found[re.sub(r"^edl:(\{.*?\}:)", "", key)] += int(await client.memory_usage(key, samples=0) or 0)
    return dict(found)


async def of_pools(url: str, seconds: float) -> dict[str, Any]:
    """Return what one more teacher, and one more student, costs: the difference of few and many."""
    found: dict[str, Any] = {}
    for role in ("teachers", "students"):
        measured = []
        for count in (FEW, MANY):
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(connect(url))
                await client.flushdb()
                await register(stack, url, role, count)
                await asyncio.sleep(2.0)  # all have reported
                per_s = await rate(client, seconds)
                measured.append((per_s, sum((await memory(client)).values())))
        (few_per_s, few_bytes), (many_per_s, many_bytes) = measured
        found[f"one of the {role}"] = {
            "commands_per_s": round((many_per_s - few_per_s) / (MANY - FEW), 2),
            "bytes": (many_bytes - few_bytes) // (MANY - FEW),
        }
    return found


async def register(stack: AsyncExitStack, url: str, role: str, count: int) -> None:
    """Register so many members of a pool, each with a client of its own, until the stack ends."""
    for number in range(count):
        client = await stack.enter_async_context(connect(url))
        member = Member(id=f"job-{number}-{os.getpid()}", address=f"10.0.0.{number}:9000")
        if role == "teachers":
            report = TeacherReport(busy=0.5, over_s=10.0, answered=1000)
            lease = hold_lease(client, Service(NAMESPACE, "pool"), member, make_report=lambda report=report: report)  # type: ignore[misc]
            await stack.enter_async_context(lease)
            continue
        students = StudentRegistry(client, NAMESPACE, ttl_s=3.0, most_pools=1)
        session = await stack.enter_async_context(students.connect("pool", member))
        session.note_report(StudentReport(waiting=0.1, asked=2.0, samples_per_s=100.0, teachers=2, over_s=10.0))


async def of_agents(url: str, seconds: float) -> dict[str, Any]:
    """Return what a job costs with one instance, and what one more instance costs."""
    measured = {}
    async with connect(url) as client:
        for count in (1, 3):
            await client.flushdb()
            settings = RuntimeSettings(redis_url=url, namespace=NAMESPACE, job="job")
            agents = [begin_agent(settings, number, count) for number in range(count)]
            try:
                async for event in follow_events(client, NAMESPACE, "job"):
                    if event.kind == "active":
                        break
                per_s = await rate(client, seconds)
                measured[count] = per_s, sum((await memory(client)).values())
            finally:
                for agent in agents:
                    agent.terminate()
                for agent in agents:
                    agent.wait()
    (one_per_s, one_bytes), (three_per_s, three_bytes) = measured[1], measured[3]
    return {
        "a job with one instance": {"commands_per_s": one_per_s, "bytes": one_bytes},
        "one more instance": {
            "commands_per_s": round((three_per_s - one_per_s) / 2, 1),
            "bytes": (three_bytes - one_bytes) // 2,
        },
    }


def begin_agent(settings: RuntimeSettings, number: int, count: int) -> subprocess.Popen[bytes]:
    """Start an agent of a job of so many instances, whose script sleeps."""
    script = [sys.executable, "-c", "import time; time.sleep(1000)"]
    command = [sys.executable, "-m", "edl_runtime.cli", "agent", "--instances", f"{count}:{count}", "--", *script]
    env = {**os.environ, **settings.to_env(), "EDL_INSTANCE": str(number)}
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def run_job(client: Redis, name: str) -> None:
    """Do what a job's agent and trainer do to Redis, from its registration to its end."""
    group = RendezvousStore(client, NAMESPACE, name, run=name, quiet_s=0.001)
    member = TrainerMember(id="0-a", index=0, ready=True)
    await group.heartbeat(member)
    draft = Generation(
        number=0,
        members=("0-a",),
        store="127.0.0.1:1",
        endpoints=("127.0.0.1:1",),
        gear="cold",
        reason="the job begins",
        proposed_by="0-a",
        proposed_at=time.time(),
    )
    while not (made := await group.propose(draft)):
        await group.heartbeat(member)
    ledger = Ledger(client, NAMESPACE, name, worker="0-a", shards=SHARDS)
    await ledger.restore(None, made.number)
    while shards := await ledger.lease():
        await ledger.ack(shards, 1)
    await ledger.commit(2, {})
    progress = Progress(run=name, step=2, updated_at=time.time(), generation=made.number)
    await publish_progress(client, NAMESPACE, name, progress)
    saved = SavedCheckpoint(job=name, step=2, epoch=1, generation=made.number, url="file:///kept", at=time.time())
    await checkpoint_events.publish(client, NAMESPACE, name, saved)
    await group.heartbeat(msgspec.structs.replace(member, finished=True))
    await group.end(JobOutcome("done"))
    await group.leave()


async def churn(url: str, jobs: int) -> dict[str, Any]:
    """Return the keys and bytes of a job that has ended, which keys never expire, and what remains of all."""
    async with connect(url) as client:
        await client.flushall()
        await run_job(client, "first")  # Redis has now loaded all scripts
        one = await memory(client)
        await client.flushall()
        before = int((await client.info("memory"))["used_memory"])
        begin = time.monotonic()
        for number in range(jobs):
            await run_job(client, f"job-{number}")
        took_s = time.monotonic() - begin
        full = int((await client.info("memory"))["used_memory"])
        names = [key async for key in client.scan_iter(count=1000)]
        lasting = 0
        for start in range(0, len(names), 1000):
            async with client.pipeline(transaction=False) as asked:
                for key in names[start : start + 1000]:
                    asked.ttl(key)
                    asked.pexpire(key, 1, lt=True)  # sooner; a key that never expires would get its first expiry
                answers = await asked.execute()
            lasting += sum(ttl < 0 for ttl in answers[::2])
        await asyncio.sleep(1.0)
        left = int(await client.dbsize())
        after = int((await client.info("memory"))["used_memory"])
    return {
        "jobs": jobs,
        "jobs_per_s": round(jobs / took_s, 1),
        "keys_of_a_job": len(names) / jobs,
        "bytes_of_a_job": (full - before) // jobs,
        "bytes_by_key": dict(sorted(one.items())),
        "keys_that_never_expire": lasting,
        "keys_left": left,
        "kept_bytes": max(0, after - before),
    }


async def measure(url: str, jobs: int, seconds: float) -> dict[str, Any]:
    return {**await of_agents(url, seconds), **await of_pools(url, seconds), "ended": await churn(url, jobs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object on one line")
    parser.add_argument("--jobs", type=at_least_1, default=10_000, help="jobs that end (10,000)")
    parser.add_argument("--seconds", type=at_least_1, default=10, help="how long commands are counted (10)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        found = asyncio.run(measure(server.url, options.jobs, options.seconds))
    print(json.dumps(found, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
