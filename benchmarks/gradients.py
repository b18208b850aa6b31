"""How fast the ranks of a group on CPUs sum gradients, beside gloo.

    python benchmarks/gradients.py --json

Each rank is a process of this machine that has Paddle. It sums the same float32 array by this project's group and by
Paddle's `ProcessGroupGloo`, in turns. Times are the mean of all ranks, from the moment in which all are ready; of these
the median. GB/s are bytes of the array by that time.

Exits with 1 when a sum is slower than 0.8 times gloo's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from _elastic_jobs import ENVIRON
from _flags import at_least_1

from edl_runtime.cli.options import print_table
from edl_runtime.elastic.comm.agent_protocol import JoinGeneration
from edl_runtime.elastic.comm.process_group import SocketProcessGroup, free_port

LEAST_SHARE = 0.8
HOST = "127.0.0.1"
LIMIT_S = 60


def sum_as_rank(rank: int, size: int, ports: Sequence[int], megabytes: Sequence[int], repeat: int) -> dict[str, Any]:
    """Return the median seconds of each way to sum, by megabytes."""
    import paddle
    from paddle.base import core
    from paddle.utils import dlpack

    paddle.disable_signal_handler()
    own_port, gloo_port = ports
    own = SocketProcessGroup(
        JoinGeneration(generation=1, rank=rank, world_size=size, store=f"{HOST}:{own_port}", instances=size)
    )
    own.connect(str(rank), None)
    os.environ["PADDLE_TRAINER_ID"] = str(rank)  # read by Paddle when it makes a group
    store = core.TCPStore(HOST, gloo_port, rank == 0, size, LIMIT_S)
    gloo: Any = core.ProcessGroupGloo.create(store, rank, size, 0)
    found = {}
    for each in megabytes:
        values = np.zeros(each * (1 << 20) // 4, np.float32)
        tensor: Any = dlpack.from_dlpack(values)
        ways: dict[str, Callable[[], Any]] = {
            "own": lambda values=values: own.all_reduce(values),
            "gloo": lambda tensor=tensor: gloo.allreduce(tensor).wait(),
        }
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(1 + repeat):
            for way, reduce in ways.items():
                values[:] = rank
                own.all_reduce_counts(np.zeros(1, np.int64))
                began = time.perf_counter_ns()
                reduce()
                took = np.array([time.perf_counter_ns() - began])
                taken[way].append(int(own.all_reduce_counts(took)[0]) / size / 1e9)
                assert (values == size * (size - 1) / 2).all()
        found[str(each)] = {way: statistics.median(times[1:]) for way, times in taken.items()}
    own.close()
    return found


def measure(size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of so many ranks, by megabytes."""
    ports = [str(free_port(HOST)) for _ in range(2)]
    flags = ["--repeat", str(options.repeat), "--megabytes", *map(str, options.megabytes)]
    with contextlib.ExitStack() as opened:
        ranks = []
        for rank in range(size):
            command = [sys.executable, __file__, *flags, "--rank", str(rank), str(size), *ports]
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **ENVIRON}))
            opened.callback(ranks[-1].wait)
            opened.callback(ranks[-1].kill)
        output, _ = ranks[0].communicate()
        found = json.loads(output.splitlines()[-1])
    return [
        {
            "ranks": size,
            "megabytes": each,
            "own_gb_s": round(each / 1024 / found[str(each)]["own"], 3),
            "gloo_gb_s": round(each / 1024 / found[str(each)]["gloo"], 3),
            "share": round(found[str(each)]["gloo"] / found[str(each)]["own"], 2),
        }
        for each in options.megabytes
    ]


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=at_least_1, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megabytes", type=at_least_1, nargs="+", default=[1, 16, 64])
    parser.add_argument("--repeat", type=at_least_1, default=7)
    parser.add_argument("--rank", type=int, nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    options = parser.parse_args()
    if options.rank:
        rank, size, *ports = options.rank
        print(json.dumps(sum_as_rank(rank, size, ports, options.megabytes, options.repeat)))
        return
    results = [result for size in options.ranks for result in measure(size, options)]
    slow = [result for result in results if result["share"] < LEAST_SHARE]
    rows = [[str(value) for value in result.values()] + ["MISSED" if result in slow else "PASS"] for result in results]
    print_table(["ranks", "MB", "own GB/s", "gloo GB/s", "of gloo's", f"must {LEAST_SHARE}"], rows)
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "results": results}))
    sys.exit(bool(slow))


if __name__ == "__main__":
    main()
