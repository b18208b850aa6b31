"""What a request with large inputs costs on its way to a teacher and back, compared with a bare socket.

    python benchmarks/wire.py --json

CPU of client and server for 16 rows of float32 and an answer of 64 KB: by a bare socket (`sendmsg`, and `recv_into`
with MSG_WAITALL) to a process that does nothing else; by a `TeacherConnection` through the socket to the real front of
a teacher without a model; by one that shares memory with it. They take turns, and the medians count.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import socket
import statistics
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from _flags import at_least_1
from _measuring import Peer, Run, instant_teachers, measured, peers

from edl_runtime.protocol.address import endpoint_of
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.oip import ModelSignature, TensorSpec

ROWS = 16
LOGITS = 1000
SHAPES = {"9.6 MB": (3, 224, 224), "200 KB": (1, 56, 56)}
ROUND_BYTES = 200_000_000
"""Bytes that each way moves in a round."""

MOST_EXCHANGES = 400

Row = npt.NDArray[np.float32]
Ask = Callable[[], None]


def benchmark(shape: tuple[int, ...], rounds: int) -> dict[str, float]:
    """Return the measurements for rows of this shape, with the unit in each name."""
    rows = [np.ones(shape, np.float32) for _ in range(ROWS)]
    size = sum(row.nbytes for row in rows)
    signature = ModelSignature(
        name="teacher",
        inputs=(TensorSpec("image", "FP32", (-1, *shape)),),
        outputs=(TensorSpec("logits", "FP32", (-1, LOGITS)),),
    )
    answer = np.zeros((ROWS, LOGITS), np.float32)
    with (
        peers(1, "_bare_server.py", str(size), str(answer.nbytes)) as (bare,),
        instant_teachers(1, signature) as (teacher,),
        socket.create_connection(endpoint_of(bare.address)) as plain,
        TeacherConnection(teacher.address) as through_socket,
        TeacherConnection(teacher.address) as sharing,
    ):
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sharing.signature()  # reads that the teacher shares memory
        ways: dict[str, tuple[Ask, Peer]] = {
            "bare": (lambda: by_socket(plain, rows, answer.nbytes), bare),
            "socket": (lambda: by_teacher(through_socket, rows), teacher),
            "shared_memory": (lambda: by_teacher(sharing, rows), teacher),
        }
        return in_turns(ways, max(1, min(MOST_EXCHANGES, math.ceil(ROUND_BYTES / size))), rounds)


def by_socket(connected: socket.socket, rows: list[Row], answer_bytes: int) -> None:
    sent = connected.sendmsg([row.data for row in rows])
    if sent != sum(row.nbytes for row in rows):
        raise SystemExit("the kernel accepted only a part")
    connected.recv_into(np.empty(answer_bytes, np.uint8).data, answer_bytes, socket.MSG_WAITALL)


def by_teacher(connection: TeacherConnection, rows: list[Row]) -> None:
    if connection.infer({"image": rows}, ["logits"])["logits"].shape != (ROWS, LOGITS):
        raise SystemExit("got an answer of another shape")


def repeat(ask: Ask, times: int) -> None:
    for _ in range(times):
        ask()


def in_turns(ways: dict[str, tuple[Ask, Peer]], exchanges: int, rounds: int) -> dict[str, float]:
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, (ask, peer) in ways.items():
            run = measured(functools.partial(repeat, ask, exchanges), [peer])
            if number:  # the first warms up
                runs[name].append(run)
    found: dict[str, float] = {}
    for name, measurements in runs.items():
        wall, client, server = (statistics.median(column) / exchanges for column in zip(*measurements, strict=True))
        found |= {
            f"{name}_client_cpu_ms": client * 1000,
            f"{name}_server_cpu_ms": server * 1000,
            f"{name}_cpu_ms": statistics.median(run.cpu_s + run.others_cpu_s for run in measurements)
            * 1000
            / exchanges,
            f"{name}_wall_ms": wall * 1000,
        }
    for name in ways:
        if name != "bare":
            found[f"{name}_ratio"] = found[f"{name}_cpu_ms"] / found["bare_cpu_ms"]
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least_1, default=15)
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    options = parser.parse_args()
    results = {name: benchmark(shape, options.rounds) for name, shape in SHAPES.items()}
    if options.json:
        print(json.dumps(results))
        return
    for request, result in results.items():
        print(f"requests of {request}")
        for name, value in result.items():
            print(f"  {name:28} {value:>10,}")


if __name__ == "__main__":
    main()
