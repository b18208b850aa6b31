"""What servers that are not ours cost a student, and how soon a killed one leaves its pool.

    python benchmarks/other_servers.py --json

- `…_client_ratio`: CPU of a student for 16 rows of 3x224x224 float32 (9.6 MB) and an answer of 64 KB, by
  `oip+http://`, over that of a bare socket, which sends the same request to the same server and receives its answer
  (`sendmsg`, and `recv_into` with MSG_WAITALL): a sender's CPU depends on how the other side reads. They take turns,
  and the medians count. `teacher` is a teacher of ours without a model, with which the student shares memory, `triton`
  a real Triton where `make interop` made one.
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
from _measuring import Peer, instant_teachers
from wire import LOGITS, ROWS, SHAPES, Ask, in_turns

from edl_runtime.external.connection import connect
from edl_runtime.protocol.address import endpoint_of
from edl_runtime.protocol.errors import ProtocolError, TeacherError
from edl_runtime.protocol.http_heads import CONTENT_LENGTH, ResponseHead, render_request
from edl_runtime.protocol.infer_messages import encode_request
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
SETTINGS = RuntimeSettings()
PATIENCE_S = 60.0
EXCHANGES = 20


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in bound]


@contextlib.contextmanager
def triton() -> Iterator[Peer]:
    """Run a Triton."""
    ports = free_ports(3)
    found = f"127.0.0.1:{ports[0]}"
    with tempfile.TemporaryDirectory(prefix="edl-") as folder:
        command = [TRITON, HERE / "_triton_logits.py", *map(str, ports)]
        env = {**os.environ, "HOME": folder, "VIRTUAL_ENV": str(TRITON.parent.parent)}
        with Path(folder, "log").open("wb") as log:
            server = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        try:
            await_ready(f"oip+http://{found}/net")
            yield Peer(found, server.pid)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(PATIENCE_S)


def await_ready(address: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        connection = connect(address, SETTINGS, timeout_s=1.0)
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
    found: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        (teacher,) = stack.enter_context(instant_teachers(1, SIGNATURE))
        servers = {"teacher": (teacher, "teacher")}
        if TRITON.exists():
            servers["triton"] = stack.enter_context(triton()), "net"
        for name, (server, model) in servers.items():
            measured = in_turns(ways_to_ask(server, model, stack), EXCHANGES, rounds)
            for way in ("bare", "student"):
                found[f"{name}_{way}_cpu_ms"] = measured[f"{way}_client_cpu_ms"]
            ratio = measured["student_client_cpu_ms"] / measured["bare_client_cpu_ms"]
            found[f"{name}_client_ratio"] = round(ratio, 3)
    return found


def ways_to_ask(server: Peer, model: str, stack: contextlib.ExitStack) -> dict[str, tuple[Ask, Peer]]:
    """Return a bare socket's way and a student's, whose connections `stack` closes."""
    rows = [np.ones(SHAPE, np.float32) for _ in range(ROWS)]
    connection = stack.enter_context(contextlib.closing(connect(f"oip+http://{server.address}/{model}", SETTINGS)))
    connection.signature()
    plain = stack.enter_context(socket.create_connection(endpoint_of(server.address)))
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    encoded = encode_request({"image": rows}, ["logits"])
    sizes = {"Inference-Header-Content-Length": len(encoded.header), "Content-Length": encoded.size}
    head = render_request("POST", f"/v2/models/{model}/infer", {"Host": server.address, **sizes})
    request = [head, encoded.header, *(row.data for row in rows)]
    size = len(head) + encoded.size
    plain.sendmsg(request)
    answer_size = len(first_answer(plain))

    def by_socket() -> None:
        if plain.sendmsg(request) != size:
            raise SystemExit("the kernel accepted only a part")
        answer = np.empty(answer_size, np.uint8)
        if plain.recv_into(answer.data, answer_size, socket.MSG_WAITALL) != answer_size:
            raise SystemExit("the server sent only a part")

    def by_student() -> None:
        if connection.infer({"image": rows}, ["logits"])["logits"].shape != (ROWS, LOGITS):
            raise SystemExit("got an answer of another shape")

    return {"bare": (by_socket, server), "student": (by_student, server)}


def first_answer(connected: socket.socket) -> bytes:
    """Return a whole answer, which later ones are as long as."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connected.recv(65536)
    head, end, body = answer.partition(b"\r\n\r\n")
    read = ResponseHead(head + end)
    size = read.size(CONTENT_LENGTH)
    if read.status != 200 or size is None:
        raise SystemExit(f"the server answers {answer[:200]!r}")
    while len(body) < size:
        body += connected.recv(size - len(body))
    return head + end + body


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
