"""What servers that are not ours cost a student, and how soon a killed one leaves its pool.

    python benchmarks/other_servers.py --json

- `client_ratio`: CPU of a student for 16 rows of 3x224x224 float32 (9.6 MB) and an answer of 64 KB, by
  `oip+http://`, over that of a bare socket to a process that does nothing else; they take turns, and the medians count.
  `teacher` is a teacher of ours without a model, with which it shares memory, `triton` a real Triton where
  `make interop` made one.
- `left_in_s`: from SIGKILL to a server until `edl register` has taken it out of the pool; the longest of all kills.

Must: ratios of at most 1.3, and 0.5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _flags import at_least_1
from _measuring import Peer, instant_teachers, peers
from wire import LOGITS, ROWS, SHAPES, Ask, by_socket, in_turns

from edl_runtime.external.connection import ExternalConnection, connect
from edl_runtime.protocol.address import endpoint_of
from edl_runtime.protocol.errors import ProtocolError, TeacherError
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.registry.directory import Directory
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect as connect_redis
from edl_runtime.store.redis_server import RedisServer

HERE = Path(__file__).parent
TRITON = HERE.parent / ".interop/triton/bin/python"
SHAPE = SHAPES["9.6 MB"]
SIGNATURE = ModelSignature(
    name="teacher",
    inputs=(TensorSpec("image", "FP32", (-1, *SHAPE)),),
    outputs=(TensorSpec("logits", "FP32", (-1, LOGITS)),),
)
PATIENCE_S = 60.0
EXCHANGES = 20


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in bound]


@contextlib.contextmanager
def triton() -> Iterator[str]:
    """Give the address of a Triton."""
    ports = free_ports(3)
    address = f"oip+http://127.0.0.1:{ports[0]}/net"
    with tempfile.TemporaryDirectory(prefix="edl-") as folder:
        command = [TRITON, HERE / "_triton_logits.py", *map(str, ports)]
        env = {**os.environ, "HOME": folder, "VIRTUAL_ENV": str(TRITON.parent.parent)}
        with Path(folder, "log").open("wb") as log:
            server = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        try:
            await_ready(address)
            yield address
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(PATIENCE_S)


def await_ready(address: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        connection = connect(address, RuntimeSettings(), timeout_s=1.0)
        try:
            if connection.ready():
                return
        except (OSError, TeacherError, ProtocolError):
            pass
        finally:
            connection.close()
        if time.monotonic() > deadline:
            raise SystemExit(f"{address} is not ready after {PATIENCE_S:g} s")
        time.sleep(0.1)


def client_ratios(rounds: int) -> dict[str, float]:
    rows = [np.ones(SHAPE, np.float32) for _ in range(ROWS)]
    size, answer_bytes = sum(row.nbytes for row in rows), ROWS * LOGITS * 4
    with contextlib.ExitStack() as stack:
        (bare,) = stack.enter_context(peers(1, "_bare_server.py", str(size), str(answer_bytes)))
        (teacher,) = stack.enter_context(instant_teachers(1, SIGNATURE))
        plain = stack.enter_context(socket.create_connection(endpoint_of(bare.address)))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        addresses = {"teacher": f"oip+http://{teacher.address}/teacher"}
        if TRITON.exists():
            addresses["triton"] = stack.enter_context(triton())
        ways: dict[str, tuple[Ask, Peer]] = {"bare": (lambda: by_socket(plain, rows, answer_bytes), bare)}
        for name, address in addresses.items():
            connection = stack.enter_context(contextlib.closing(connect(address, RuntimeSettings())))
            connection.signature()

            def ask(connection: ExternalConnection = connection) -> None:
                if connection.infer({"image": rows}, ["logits"])["logits"].shape != (ROWS, LOGITS):
                    raise SystemExit("got an answer of another shape")

            ways[name] = ask, teacher
        found = in_turns(ways, EXCHANGES, rounds)
    clients = {name: found[f"{name}_client_cpu_ms"] for name in ways}
    ratios = {f"{name}_client_ratio": round(clients[name] / clients["bare"], 3) for name in addresses}
    return {**{f"{name}_client_cpu_ms": value for name, value in clients.items()}, **ratios}


def left_in_s(kills: int) -> float:
    """Return the longest time from SIGKILL to a server until it is out of the pool."""
    with tempfile.TemporaryDirectory(prefix="edl-") as folder, RedisServer(Path(folder)) as redis:
        env = {**os.environ, "EDL_REDIS_URL": redis.url}
        (port,) = free_ports(1)
        edl = [sys.executable, "-m", "edl_runtime.cli"]
        url = f"http://127.0.0.1:{port}"
        teacher = [*edl, "teacher", "--model", "_doubling:double", "--port", str(port)]
        register = [*edl, "register", "--pool", "images", "--url", url, "--model", "teacher"]
        sidecar = subprocess.Popen(register, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return max(asyncio.run(one_kill(teacher, redis.url)) for _ in range(kills))
        finally:
            sidecar.terminate()
            sidecar.wait(PATIENCE_S)


async def one_kill(teacher: list[str], redis_url: str) -> float:
    async with connect_redis(redis_url) as client:
        directory = Directory(client, "default")

        async def until_registered(*, listed: bool) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while bool(await directory.members("images", "teachers")) is not listed:  # noqa: ASYNC110 - Redis is polled
                    await asyncio.sleep(0.005)

        server = await asyncio.create_subprocess_exec(
            *teacher, cwd=HERE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            await until_registered(listed=True)
        finally:
            server.kill()
        killed_at = time.monotonic()
        await until_registered(listed=False)
        await server.wait()
        return time.monotonic() - killed_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least_1, default=7)
    parser.add_argument("--kills", type=at_least_1, default=10)
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    flags = parser.parse_args()
    found = {**client_ratios(flags.rounds), "left_in_s": round(left_in_s(flags.kills), 3)}
    print(json.dumps(found) if flags.json else "\n".join(f"{value:10} {name}" for name, value in found.items()))
    if found["left_in_s"] > 0.5 or any(value > 1.3 for name, value in found.items() if name.endswith("ratio")):
        sys.exit(1)


if __name__ == "__main__":
    main()
