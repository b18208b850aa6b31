"""How many shards a second workers lease and acknowledge, in batches of several sizes.

    python benchmarks/ledger.py --json

Each worker is a process of its own with a ledger of 100,000 shards in a real Redis on this machine, which they share.
It leases a batch, acknowledges it, and so on, for a while; between the two a trainer would train. A shard that was
leased and acknowledged counts once. `state_bytes` and `commit_ms` are of a checkpoint in the middle of that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from _flags import at_least_1
from redis.asyncio import Redis

from edl_runtime.shards.ledger import Ledger, ShardPlan
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

BATCHES = (1, 8, 32, 128)
WORKERS = (1, 4)
SHARDS = 100_000
PLAN = ShardPlan(epochs=1_000)


def ledger_of(client: Redis, job: str, worker: str) -> Ledger:
    """Return a worker's ledger of all the shards."""
    names = [f"s3://bucket/folder/part-{number:06}.parquet" for number in range(SHARDS)]
    return Ledger(client, "benchmark", job, worker=worker, shards=names, plan=PLAN)


async def work(redis_url: str, job: str, worker: str, batch: int) -> None:
    """Run a worker: print "ready", read the seconds to work, and print how many shards it has finished."""
    async with connect(redis_url) as client:
        ledger = ledger_of(client, job, worker)
        await ledger.begin(1)
        print("ready", flush=True)
        seconds = float(sys.stdin.readline())
        finished, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            shards = await ledger.lease(batch) or []
            await ledger.ack(shards, finished)
            finished += len(shards)
        print(json.dumps({"finished": finished, "took_s": time.perf_counter() - started}), flush=True)


def shards_per_s(redis_url: str, workers: int, batch: int, seconds: float) -> int:
    """Measure `workers` workers at once."""
    job = f"{workers}x{batch}"
    asyncio.run(prepare(redis_url, job))
    commands = [
        [sys.executable, __file__, "--work", redis_url, job, f"w{number}", str(batch)] for number in range(workers)
    ]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    for process in running:
        assert process.stdin is not None
        process.stdin.write(f"{seconds}\n")
        process.stdin.flush()
    reports = [json.loads(process.communicate()[0]) for process in running]
    return int(sum(one["finished"] / one["took_s"] for one in reports))


async def prepare(redis_url: str, job: str) -> None:
    """Make the ledger of a measurement."""
    async with connect(redis_url) as client:
        await ledger_of(client, job, "first").restore(None, 1)


async def checkpoint(redis_url: str) -> dict[str, float]:
    """Return the cost of a checkpoint with half of an epoch done and 64 leased shards."""
    async with connect(redis_url) as client:
        ledger = ledger_of(client, "checkpoint", "w")
        await ledger.restore(None, 1)
        for step in range(SHARDS // 2000):
            await ledger.ack(await ledger.lease(1000) or [], step)
        await ledger.lease(64)
        started = time.perf_counter()
        state = await ledger.commit(SHARDS, {})
        took_s = time.perf_counter() - started
        return {"state_bytes": len(msgspec.json.encode(state)), "commit_ms": round(took_s * 1000, 2)}


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least_1, default=3, help="of each case the best of so many counts")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time, once")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        redis_url, job, worker, batch = options.work
        asyncio.run(work(redis_url, job, worker, int(batch)))
        return
    seconds, rounds = (0.2, 1) if options.quick else (2.0, options.rounds)
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        rates = {
            f"{workers} workers, batches of {batch}": max(
                shards_per_s(server.url, workers, batch, seconds) for _ in range(rounds)
            )
            for workers in WORKERS
            for batch in BATCHES
        }
        results = {"shards_per_s": rates, **asyncio.run(checkpoint(server.url))}
    if options.json:
        print(json.dumps(results))
        return
    for case, rate in rates.items():
        print(f"{case:32} {rate:>8,} shards a second")
    print(f"a checkpoint's state has {results['state_bytes']} bytes, made in {results['commit_ms']} ms")


if __name__ == "__main__":
    main()
