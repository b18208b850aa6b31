"""A rank of several process groups, one after the other: `group_process.py RANK SIZE PORT OUT`. Prints JSON."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from edl_runtime.elastic.comm.agent_protocol import JoinGeneration
from edl_runtime.elastic.comm.process_group import CHUNK_BYTES, PaddleProcessGroup
from edl_runtime.elastic.errors import GroupLostError

GENERATIONS = 4


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- names only


def listens(port: int) -> bool:
    with socket.socket() as other:
        return other.connect_ex(("127.0.0.1", port)) == 0


def main(rank: int, size: int, port: int, out: Path) -> dict[str, Any]:
    """Reduce, broadcast and abort in each group; return counts of descriptors, errors and CPU use.

    Rank 0 touches `out`/free-N after its abort.
    """
    mine, other = socket.socketpair()
    elsewhere = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(elsewhere.getsockname())
    seen: dict[str, Any] = {"descriptors": [], "raised": 0, "listens": False}
    for generation in range(1, GENERATIONS + 1):
        join = JoinGeneration(
            generation=generation, rank=rank, world_size=size, store=f"127.0.0.1:{port}", instances=size
        )
        moves: list[None] = []
        group = PaddleProcessGroup(join, "gloo", on_progress=lambda moves=moves: moves.append(None))
        assert group.connect(str(rank), generation if rank else None).steps == [None] + [generation] * (size - 1)
        assert group.all_reduce_counts(np.arange(3) + rank).tolist() == [
            sum(at + each for each in range(size)) for at in range(3)
        ]
        for dtype in ("float32", "float64", "bfloat16"):
            values = paddle.full([5], rank + 1.0, dtype=dtype)
            group.all_reduce(values)
            assert values.astype("float32").tolist() == [sum(range(1, size + 1))] * 5
        wanted = np.resize(np.arange(251, dtype=np.uint8), 2 * CHUNK_BYTES + 1000)
        given = wanted.copy() if rank == 1 else np.zeros(len(wanted), np.uint8)
        group.broadcast(given, 1, [receiver for receiver in range(size) if receiver != 1])
        assert (given == wanted).all()
        assert len(moves) == 3
        if rank == 0:  # the other ranks do not take part in this collective
            aborter = threading.Timer(0.2, group.abort)
            aborter.start()
            seen["listens"] |= listens(group._store_port)
            try:
                if generation % 2:
                    group.all_reduce_counts(np.zeros(1, np.int64))
                else:
                    group.all_reduce(paddle.zeros([1]))
            except GroupLostError:
                seen["raised"] += 1
            aborter.join()
            (out / f"free-{generation}").touch()
        else:
            while not (out / f"free-{generation}").exists():  # so that rank 0 is not released by the end of this rank
                time.sleep(0.01)
        group.close()
        mine.sendall(b"a")
        assert other.recv(1) == b"a"
        client.sendall(b"b")  # sockets of others were not shut down
        time.sleep(0.1)  # until gloo has closed its sockets
        seen["descriptors"].append(descriptors())
    used = time.process_time()
    time.sleep(0.5)
    seen["idle_share"] = (time.process_time() - used) / 0.5
    return seen


if __name__ == "__main__":
    paddle.disable_signal_handler()
    print(json.dumps(main(*map(int, sys.argv[1:4]), Path(sys.argv[4]))))  # noqa: T201
