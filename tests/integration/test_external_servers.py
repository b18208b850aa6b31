"""Servers of other protocols, for which a teacher of ours stands in; `tests/interop` has the real ones."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
from support.external_servers import DECLARED, SERVERS, WEIGHTS
from support.network.certificates import Authority
from support.network.ports import free_ports
from support.paths import TESTS
from support.students.readers import await_cause
from support.teachers.process import PATIENCE_S, Teacher, running_teacher, wait_until

from edl_runtime.distill import Discovered, DistillReader, Fixed
from edl_runtime.distill.errors import NoTeacherError
from edl_runtime.external.connection import connect
from edl_runtime.protocol.errors import InferenceError, ModelNotReadyError
from edl_runtime.protocol.paddle_serving import (
    FRAME,
    GENERAL,
    OLD_GENERAL,
    RPC,
    arrays_of_tensors,
    frame_sizes,
    pack_frame,
)
from edl_runtime.protocol.tls import client_trust
from edl_runtime.registry.directory import Directory
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect as connect_redis

IMAGES = np.random.default_rng(18).integers(0, 256, (300, 1, 28, 28)).astype(np.float32)


def samples() -> Iterator[tuple[Any, int]]:
    return ((image, number) for number, image in enumerate(IMAGES))


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """Addresses of one teacher by scheme."""
    http, grpc, paddle = free_ports(3)
    flags = ("--port", http, "--grpc-port", grpc, "--paddle-port", paddle)
    with running_teacher("ours:net", *map(str, flags), env={"PYTHONPATH": str(SERVERS)}):
        yield {
            "oip+http": f"oip+http://127.0.0.1:{http}/teacher",
            "oip+grpc": f"oip+grpc://127.0.0.1:{grpc}/teacher",
            **{
                f"paddle-serving+{carrier}": f"paddle-serving+{carrier}://127.0.0.1:{paddle}/net{DECLARED}"
                for carrier in ("http", "grpc", "brpc")
            },
        }


SCHEMES = ("oip+http", "oip+grpc", "paddle-serving+http", "paddle-serving+grpc", "paddle-serving+brpc")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_student_gets_right_answers_in_order(scheme: str, addresses: dict[str, str]) -> None:
    with DistillReader(
        samples, inputs=["image", None], outputs=["logits"], format="sample", teachers=Fixed((addresses[scheme],))
    ) as reader:
        items = list(reader)
    assert [number for _, number, _ in items] == list(range(len(IMAGES)))
    assert np.array_equal([logits for *_, logits in items], IMAGES.reshape(-1, 784) @ WEIGHTS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_wrong_input_is_refused_by_name(scheme: str, addresses: dict[str, str]) -> None:
    connection = connect(addresses[scheme], RuntimeSettings())
    with pytest.raises(InferenceError, match="INT64"):
        connection.infer({"image": IMAGES[:2].astype(np.int64)}, ["logits"])
    connection.close()


def test_tls_and_a_token_hold_over_grpc_and_http(tmp_path: Path) -> None:
    """A server whose certificate or token differs is not used."""
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    files = ours.sign("127.0.0.1")
    http, grpc = free_ports(2)
    env = {**files.to_env(), "EDL_TEACHER_TOKEN": "secret"}
    flags = ("--port", str(http), "--grpc-port", str(grpc))
    with running_teacher("ours:net", *flags, env={**env, "PYTHONPATH": str(SERVERS)}):
        for address in (f"oip+https://127.0.0.1:{http}/teacher", f"oip+grpcs://127.0.0.1:{grpc}/teacher"):

            def ask(address: str, ca: Path, token: str) -> Any:
                settings = RuntimeSettings(teacher_ca=str(ca), teacher_token=token)
                connection = connect(address, settings, trust=client_trust(settings))
                try:
                    connection.open()
                    return connection.infer({"image": IMAGES[:2]}, ["logits"])["logits"]
                finally:
                    connection.close()

            assert np.array_equal(ask(address, ours.ca, "secret"), IMAGES[:2].reshape(-1, 784) @ WEIGHTS)
            with pytest.raises(InferenceError, match="token") as refused:
                ask(address, ours.ca, "another")
            assert refused.value.status == 401
            with pytest.raises(OSError, match=r"(?i)certificate"):
                ask(address, theirs.ca, "secret")


def test_a_token_holds_for_paddle_serving() -> None:
    (port,) = free_ports(1)
    flags = ("--paddle-port", str(port))
    with running_teacher("ours:net", *flags, env={"EDL_TEACHER_TOKEN": "secret", "PYTHONPATH": str(SERVERS)}):
        for carrier in ("http", "grpc", "brpc"):
            for token in ("secret", "another"):
                address = f"paddle-serving+{carrier}://127.0.0.1:{port}/net{DECLARED}"
                with closing(connect(address, RuntimeSettings(teacher_token=token))) as connection:
                    assert connection.ready()
                    if token == "secret":
                        answer = connection.infer({"image": IMAGES[:2]}, ["logits"])["logits"]
                        assert np.array_equal(answer, IMAGES[:2].reshape(-1, 784) @ WEIGHTS)
                    else:
                        with pytest.raises(InferenceError, match="token is missing or wrong"):
                            connection.infer({"image": IMAGES[:2]}, ["logits"])


# Other clients of ours


def exchange(address: str, content: bytes, is_whole: Callable[[bytes], bool]) -> bytes:
    """Send bytes, and return what comes back until it is whole or the connection ends."""
    host, _, port = address.rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connected:
        connected.sendall(content)
        while not is_whole(answer) and (data := connected.recv(65536)):
            answer += data
    return answer


def curl(address: str, path: str, *arguments: str, given: bytes = b"") -> tuple[int, bytes]:
    """Return what `curl` gets: status and body."""
    program = shutil.which("curl")
    if program is None:
        pytest.skip("there is no curl")
    url = f"http://{urlsplit(address).netloc}/v2/{path}"
    command = [program, "--silent", "--show-error", "--max-time", "100", "--write-out", "%{http_code}", *arguments, url]
    done = subprocess.run(command, input=given, capture_output=True, timeout=2 * PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout[-3:]), done.stdout[:-3]


def test_curl_asks_for_health_metadata_and_answers(addresses: dict[str, str]) -> None:
    """With JSON, flat or nested; with binary tensors; with a body for which it awaits "100 Continue"."""
    address, infer = addresses["oip+http"], "models/teacher/infer"
    assert curl(address, "health/ready")[0] == 200
    assert curl(address, "models/teacher/ready")[0] == 200
    status, body = curl(address, "models/teacher")
    assert status == 200
    assert json.loads(body)["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 28, 28]}]
    image = {"name": "image", "datatype": "FP32", "shape": [2, 1, 28, 28]}
    expected = IMAGES[:2].reshape(-1, 784) @ WEIGHTS
    for data in (IMAGES[:2].ravel().tolist(), IMAGES[:2].tolist()):
        text = json.dumps({"inputs": [{**image, "data": data}]}).encode()
        status, body = curl(address, infer, "--json", "@-", given=text)
        (logits,) = json.loads(body)["outputs"]
        assert np.array_equal(np.reshape(logits["data"], logits["shape"]), expected)
    rows = 400  # 1.2 MB, more than the megabyte from which curl awaits the server's word
    binary = {**image, "shape": [rows, 1, 28, 28], "parameters": {"binary_data_size": rows * 784 * 4}}
    outputs = [{"name": "logits", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": [binary], "outputs": outputs}).encode()
    sent = head + np.resize(IMAGES, (rows, 1, 28, 28)).tobytes()
    flags = ("-H", f"Inference-Header-Content-Length: {len(head)}", "-H", "Expect: 100-continue", "--data-binary", "@-")
    status, body = curl(address, infer, *flags, given=sent)
    logits = np.frombuffer(body[-rows * 40 :], np.float32).reshape(rows, 10)
    assert np.array_equal(logits[:300], IMAGES.reshape(-1, 784) @ WEIGHTS)


def test_curl_is_told_what_is_wrong(addresses: dict[str, str]) -> None:
    """As JSON with what was given and what is allowed."""
    address, infer = addresses["oip+http"], "models/teacher/infer"
    image = {"name": "image", "datatype": "INT64", "shape": [1, 1, 28, 28], "data": [0] * 784}
    for path, arguments, given, expected, named in (
        ("models/nobody", (), b"", 404, "served is model 'teacher'"),
        (infer, ("--json", "@-"), b'{"inputs": [', 400, "JSON is invalid"),
        (infer, ("--json", "@-"), json.dumps({"inputs": [image]}).encode(), 400, "the model takes FP32"),
        (infer, ("-X", "PUT", "-d", ""), b"", 405, "PUT"),
        (infer, ("-H", "Transfer-Encoding: chunked", "--json", "@-"), b"{}", 411, "Content-Length"),
    ):
        status, body = curl(address, path, *arguments, given=given)
        assert (status, named in json.loads(body)["error"]) == (expected, True), body


def paddle_port(addresses: dict[str, str]) -> str:
    return urlsplit(addresses["paddle-serving+brpc"]).netloc


RECORDED = TESTS / "support/recorded"
"""What the clients of Paddle Serving send: two images, the numbers from 0 on modulo 11."""

ANSWER = (np.arange(2 * 784, dtype=np.float32).reshape(2, 784) % 11) @ WEIGHTS


def frames(content: bytes) -> list[tuple[Any, bytes]]:
    """Return the RpcMeta and the message of each whole frame."""
    found = []
    while len(content) >= FRAME.size:
        size, meta_size = frame_sizes(content, 1 << 20)
        frame, content = content[FRAME.size :][:size], content[FRAME.size + size :]
        if len(frame) == size:
            found.append((RPC["RpcMeta"].FromString(frame[:meta_size]), frame[meta_size:]))
    return found


def logits_of(response: Any) -> Any:
    assert not response.err_no, response.err_msg
    return arrays_of_tensors(response.outputs[0].tensor, "output")["logits"]


def test_paddle_servings_brpc_client_is_answered(addresses: dict[str, str]) -> None:
    """By what it sent once; its next request may come through the same connection."""
    recorded = (RECORDED / "paddle-serving-0.9.0-brpc.bin").read_bytes()
    answer = exchange(paddle_port(addresses), 2 * recorded, lambda content: len(frames(content)) == 2)
    (meta, first), (_, second) = frames(answer)
    ((asked, _),) = frames(recorded)
    assert meta.correlation_id == asked.correlation_id
    assert np.array_equal(logits_of(GENERAL["Response"].FromString(first)), ANSWER)
    assert np.array_equal(logits_of(GENERAL["Response"].FromString(second)), ANSWER)


def test_the_client_of_the_original_edl_is_answered(addresses: dict[str, str]) -> None:
    """By what Paddle Serving's client 0.3.2 sent, with a sample in each instance. Errors are those of the protocol."""
    recorded = (RECORDED / "paddle-serving-0.3.2-brpc.bin").read_bytes()
    ((meta, content),) = frames(exchange(paddle_port(addresses), recorded, lambda content: len(frames(content)) == 1))
    assert not meta.response.error_code
    (logits,) = OLD_GENERAL["Response"].FromString(content).outputs[0].insts[0].tensor_array
    assert np.array_equal(np.reshape(logits.float_data, logits.shape), ANSWER)
    ((asked, content),) = frames(recorded)
    request = OLD_GENERAL["Request"].FromString(content)
    request.fetch_var_names[:] = ["nothing"]
    wrong = pack_frame(asked, request.SerializeToString())
    ((meta, _),) = frames(exchange(paddle_port(addresses), wrong, lambda content: len(frames(content)) == 1))
    assert meta.response.error_code
    assert "'nothing' is unknown; the model has logits" in meta.response.error_text


@pytest.mark.parametrize("how", ["proto", "json", "gzip", "json-gzip"])
def test_paddle_servings_http_client_is_answered(how: str, addresses: dict[str, str]) -> None:
    """In the form that it asked for: messages or JSON, packed or not."""
    recorded = (RECORDED / f"paddle-serving-0.9.0-{how}.bin").read_bytes()
    answer = exchange(paddle_port(addresses), recorded.replace(b"keep-alive", b"close"), lambda _: False)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    if b"gzip" in head:
        body = gzip.decompress(body)
    if "json" in how:
        (tensor,) = json.loads(body)["outputs"][0]["tensor"]
        assert np.array_equal(np.reshape(tensor["float_data"], tensor["shape"]), ANSWER)
    else:
        assert b"\r\nContent-Type: application/proto\r\n" in head  # without a charset
        assert np.array_equal(logits_of(GENERAL["Response"].FromString(body)), ANSWER)


@pytest.mark.parametrize(
    "content",
    [
        b"PRPC" + b"\xff" * 8,
        pack_frame(RPC["RpcMeta"](compress_type=9), b""),
        pack_frame(RPC["RpcMeta"](compress_type=2), b"no gzip"),
        pack_frame(RPC["RpcMeta"](), b"\xff\xff"),
        b"POST /GeneralModelService/inference HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n\xff\xff",
        b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
    ],
    ids=["huge", "unknown compression", "no gzip", "no message", "no message in HTTP", "path", "version", "TLS"],
)
def test_what_is_no_request_harms_nobody(content: bytes, addresses: dict[str, str]) -> None:
    """It is refused or cut off, and the next client is answered."""
    exchange(paddle_port(addresses), content, lambda answer: len(answer) > 8)
    test_paddle_servings_brpc_client_is_answered(addresses)


# Registered servers


class Registered:
    """`edl register` beside a server that is not running yet, and a file that says when it is in the pool."""

    def __init__(self, scheme: str, settings: RuntimeSettings, folder: Path) -> None:
        self.ready = folder / "ready"
        (port,) = free_ports(1)
        protocol, _, carrier = scheme.partition("+")
        port_flag = {"paddle-serving": "--paddle-port", "oip": "--grpc-port" if carrier == "grpc" else "--port"}[
            protocol
        ]
        self._serving = ("ours:net", port_flag, str(port))
        flags = ["--pool", "images", "--ready-file", str(self.ready), "--drain-s", "0", "--model", "teacher"]
        flags += ["--protocol", protocol, "--url", f"{carrier}://127.0.0.1:{port}"]
        if protocol == "paddle-serving":
            flags += ["--inputs", "image:FP32:-1.1.28.28", "--outputs", "logits:FP32:-1.10"]
        command = [sys.executable, "-m", "edl_runtime.cli", "register", *flags]
        self.sidecar = subprocess.Popen(command, env=settings.to_env(), stderr=subprocess.DEVNULL)

    def server(self) -> AbstractContextManager[Teacher]:
        return running_teacher(*self._serving, env={"PYTHONPATH": str(SERVERS)})

    def wait_for(self, *, ready: bool) -> None:
        wait_until(lambda: self.ready.exists() is ready)


@pytest.fixture
def registered(request: pytest.FixtureRequest, settings: RuntimeSettings, tmp_path: Path) -> Iterator[Registered]:
    """Of the scheme that the test is parametrized with."""
    registered = Registered(request.param, settings, tmp_path)
    yield registered
    registered.sidecar.terminate()
    assert registered.sidecar.wait(PATIENCE_S) == 0


EACH_WAY = pytest.mark.parametrize("registered", ["oip+http", "oip+grpc", "paddle-serving+brpc"], indirect=True)


def pool(settings: RuntimeSettings) -> list[str]:
    """Return the addresses in the registry."""

    async def registered() -> list[str]:
        async with connect_redis(settings.redis_url) as client:
            return [member.address for member in await Directory(client, settings.namespace).members("images")]

    return asyncio.run(registered())


@EACH_WAY
def test_a_registered_server_leaves_when_it_is_killed_and_comes_back(
    registered: Registered, settings: RuntimeSettings
) -> None:
    """And leaves at once when its sidecar is told to end. Its file says when it is in the pool."""
    for _ in range(2):
        with registered.server() as server:
            registered.wait_for(ready=True)
            with DistillReader(
                samples,
                inputs=["image", None],
                outputs=["logits"],
                format="sample",
                teachers=Discovered("images"),
                settings=settings,
            ) as reader:
                assert np.array_equal([logits for *_, logits in reader], IMAGES.reshape(-1, 784) @ WEIGHTS)
            server.process.kill()
            registered.wait_for(ready=False)


@pytest.mark.parametrize("registered", ["oip+http"], indirect=True)
def test_a_registered_server_is_back_after_redis_was_emptied_and_its_sidecar_stood_still(
    registered: Registered, settings: RuntimeSettings
) -> None:
    async def empty() -> None:
        async with connect_redis(settings.redis_url) as client:
            await client.flushall()

    with registered.server():
        registered.wait_for(ready=True)
        for _ in range(2):
            asyncio.run(empty())
            wait_until(lambda: bool(pool(settings)))
        registered.sidecar.send_signal(signal.SIGSTOP)
        wait_until(lambda: not pool(settings))
        registered.sidecar.send_signal(signal.SIGCONT)
        wait_until(lambda: bool(pool(settings)))


def test_the_file_of_a_sidecar_that_was_killed_is_removed(settings: RuntimeSettings, tmp_path: Path) -> None:
    """It would tell a readiness probe that the server is in the pool. Here no server is there at all."""
    (tmp_path / "ready").touch()
    registered = Registered("oip+http", settings, tmp_path)
    registered.wait_for(ready=False)
    registered.sidecar.kill()
    registered.sidecar.wait()


async def test_servers_that_hang_delay_no_other(settings: RuntimeSettings) -> None:
    """All are asked at the same time, more of them than threads that Python would share among them."""
    waiting, all_wait = 0, asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal waiting
        await reader.readuntil(b"\r\n\r\n")
        waiting += 1
        if waiting == 40:
            all_wait.set()
        await reader.read()
        waiting -= 1
        writer.close()

    servers = [await asyncio.start_server(hang, "127.0.0.1", 0) for _ in range(40)]
    flags = [f"--server=oip+http://127.0.0.1:{one.sockets[0].getsockname()[1]}/net" for one in servers]
    command = [sys.executable, "-m", "edl_runtime.cli", "register", "--pool", "images", "--drain-s", "0", *flags]
    sidecar = await asyncio.create_subprocess_exec(*command, env=settings.to_env(), stderr=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await all_wait.wait()
    finally:
        sidecar.terminate()
        assert await sidecar.wait() == 0
        for one in servers:
            one.close()


@EACH_WAY
def test_a_registered_server_that_hangs_leaves_and_comes_back(registered: Registered) -> None:
    """It still takes connections, as its socket does without it, and answers nothing."""
    with registered.server() as server:
        registered.wait_for(ready=True)
        server.process.send_signal(signal.SIGSTOP)
        registered.wait_for(ready=False)
        server.process.send_signal(signal.SIGCONT)
        registered.wait_for(ready=True)


@pytest.mark.parametrize("scheme", ["oip+http", "oip+grpc"])
def test_a_server_without_the_model_says_so(scheme: str, addresses: dict[str, str]) -> None:
    """With what was asked for, and what it serves."""
    wrong = addresses[scheme].replace("/teacher", "/nobody")
    refused = pytest.raises(ModelNotReadyError, match=r"nobody.*'teacher'")
    with closing(connect(wrong, RuntimeSettings())) as connection, refused:
        connection.ready()


def test_a_student_names_its_teacher_and_what_that_says(addresses: dict[str, str]) -> None:
    wrong = addresses["oip+http"].replace("/teacher", "/nobody")
    reader = DistillReader(
        samples,
        inputs=["image", None],
        outputs=["logits"],
        format="sample",
        teachers=Fixed((wrong,)),
        settings=RuntimeSettings(teacher_wait_s=0.4),
    )
    with reader:
        await_cause(reader)
        with pytest.raises(NoTeacherError, match=rf"{re.escape(wrong)}: its model is not ready.*'teacher'"):
            next(iter(reader))


def test_a_server_that_comes_back_with_another_model_stays_out_until_it_has_the_pools_again(
    settings: RuntimeSettings, tmp_path: Path
) -> None:
    """The other server of the same process stays in the pool all the time."""
    settings = msgspec.structs.replace(settings, lease_ttl_s=12.0)  # for as long the other model waits
    first, second = free_ports(2)
    ready, log = tmp_path / "ready", tmp_path / "log"
    servers = [f"--server=oip+http://127.0.0.1:{port}/teacher" for port in (first, second)]
    hurried = "from edl_runtime.external import sidecar; sidecar.RETRY_EVERY_S = 0.5; "
    hurried += "from edl_runtime.cli import main; main()"
    command = [sys.executable, "-c", hurried, "register", "--pool", "images", "--drain-s", "0", *servers]

    def serving(model: str, port: int) -> AbstractContextManager[Teacher]:
        env = {"PYTHONPATH": f"{SERVERS}:{TESTS / 'system/dags'}"}
        return running_teacher(model, "--port", str(port), env=env)

    with log.open("w") as errors, serving("ours:net", first):
        sidecar = subprocess.Popen([*command, "--ready-file", ready], env=settings.to_env(), stderr=errors)
        try:
            with serving("ours:net", second) as server:
                wait_until(ready.exists)
                server.process.kill()
                wait_until(lambda: not ready.exists())
            with serving("answers:double", second):
                wait_until(lambda: "differs from pool 'images'" in log.read_text())
                assert pool(settings) == [servers[0].removeprefix("--server=")]
            with serving("ours:net", second):
                wait_until(ready.exists)
                assert len(pool(settings)) == 2
        finally:
            sidecar.terminate()
        assert sidecar.wait(PATIENCE_S) == 0
        assert pool(settings) == []


@pytest.mark.parametrize(
    ("flags", "status", "named"),
    [
        (["--url", "http://127.0.0.1:1"], 2, "Give --url and --model"),
        (["--url", "http://127.0.0.1:1", "--model", "net", "--server", "oip+http://t:1/net"], 2, "Give --url"),
        (["--server", "http://t:1/net"], 78, "oip+http://HOST:PORT/MODEL"),
        (["--url", "ftp://127.0.0.1:1", "--model", "net"], 78, "oip+ftp"),
        (["--url", "http://127.0.0.1", "--model", "net"], 78, "host:port"),
        (["--url", "grpc://127.0.0.1:1", "--model", "net", "--inputs", "image"], 78, "NAME:DATATYPE"),
        (["--url", "grpc://127.0.0.1:1", "--model", "net", "--max-batch", "0"], 2, "--max-batch"),
        (["--server", "oip+http://t:1/net", "--server", "oip+http://T:1/net/"], 78, "oip+http://t:1/net and oip+http"),
        (["--server", "oip+http://t:1/net", "--ready-file", "/nowhere/ready"], 78, "/nowhere/ready"),
    ],
)
def test_wrong_options_are_refused_by_name(flags: list[str], status: int, named: str) -> None:
    command = [sys.executable, "-m", "edl_runtime.cli", "register", "--pool", "images", *flags]
    env = {**os.environ, "EDL_REDIS_URL": "redis://127.0.0.1:1"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == status
    assert named in ended.stderr
