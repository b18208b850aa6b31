"""The server for clients of Paddle Serving, without a model."""

from __future__ import annotations

import asyncio
import gc
import gzip
import io
import json
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
import pytest

from edl_runtime.protocol.infer_messages import REQUEST_JSON_LIMIT
from edl_runtime.protocol.paddle_serving import (
    FRAME,
    GENERAL,
    GENERAL_PATH,
    RPC,
    arrays_of_tensors,
    fill_tensor,
    frame_sizes,
    pack_frame,
)
from edl_runtime.teacher import other_body, paddle_server
from edl_runtime.teacher.http.admission import SideMemory
from edl_runtime.teacher.paddle_server import GeneralModelService, serving_paddle

LIMIT_S = 60.0


class Idle:
    """A model that nobody asks."""

    def __init__(self, most: int = 64 << 20) -> None:
        self.memory = SideMemory(most)


NO_REQUESTS: Any = Idle()
"""No request comes as far as the model."""


async def test_a_client_without_the_token_is_refused_before_its_body_comes() -> None:
    """Its body would be kept in memory."""
    service = GeneralModelService(NO_REQUESTS, ["x"], "secret")
    frame = pack_frame(RPC["RpcMeta"](correlation_id=7, authentication_data=b"wrong"), bytes(1 << 20))
    async with asyncio.timeout(LIMIT_S), serving_paddle(service, "127.0.0.1", 0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        _, meta_size = frame_sizes(frame, 1 << 30)
        writer.write(frame[: FRAME.size + meta_size])
        answer = await reader.read()
        writer.close()
    size, meta_size = frame_sizes(answer, 1 << 20)
    meta = RPC["RpcMeta"].FromString(answer[FRAME.size :][:meta_size])
    assert (size, meta.correlation_id, meta.response.error_code) == (meta_size, 7, 1004)
    assert "EDL_TEACHER_TOKEN" in meta.response.error_text


async def test_a_client_that_sends_nothing_makes_room_for_another() -> None:
    service = GeneralModelService(NO_REQUESTS, ["x"])
    async with asyncio.timeout(LIMIT_S), serving_paddle(service, "127.0.0.1", 0, most_connections=2) as port:
        silent, silent_writer = await asyncio.open_connection("127.0.0.1", port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await silent.read() == b""
        writer.write(b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 404")
        silent_writer.close()
        writer.close()


class Sums(Idle):
    """Answers requests with the sum of their input."""

    async def infer(self, inputs: dict[str, np.ndarray], _: list[str]) -> dict[str, np.ndarray]:
        return {"sum": inputs["x"].sum(keepdims=True)}


SUMS: Any = Sums()


async def answer_of(
    content: bytes, kind: str, encoding: str = "identity", *, requests: Any = SUMS
) -> tuple[int, bytes]:
    """Return status and body of the answer to a POST."""
    async with (
        serving_paddle(GeneralModelService(requests, ["x"]), "127.0.0.1", 0) as port,
        aiohttp.ClientSession() as client,
    ):
        url = f"http://127.0.0.1:{port}{GENERAL_PATH}"
        headers = {"Content-Type": kind, "Content-Encoding": encoding}
        async with client.post(url, data=io.BytesIO(content), headers=headers) as answer:
            return answer.status, await answer.read()


@pytest.mark.parametrize("numbers", [10, 1_000_000])
async def test_a_batch_of_images_is_answered_over_http(numbers: int) -> None:
    """Requests of some megabytes are common."""
    request = GENERAL["Request"]()
    fill_tensor(request.tensor.add(name="x", alias_name="x"), np.ones(numbers, np.float32))
    status, content = await answer_of(request.SerializeToString(), "application/proto")
    assert status == 200
    (output,) = GENERAL["Response"].FromString(content).outputs
    assert arrays_of_tensors(output.tensor, "output")["sum"] == numbers


async def test_a_compressed_body_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kilobytes may be any number of gigabytes when they are unpacked."""
    monkeypatch.setattr("edl_runtime.protocol.compression.UNPACKED_LIMIT", 1_000_000)
    status, content = await answer_of(gzip.compress(bytes(1_000_001)), "application/proto", "gzip")
    assert status == 400
    assert b"more than 1000000 bytes" in content
    status, content = await answer_of(b"", "application/proto", "br")
    assert status == 400
    assert b"'br', allowed is gzip" in content


async def test_json_has_a_limit() -> None:
    """It is parsed by the event loop, which has other clients; the answer says what to send instead."""
    status, content = await answer_of(b" " * (REQUEST_JSON_LIMIT + 1), "application/json")
    assert status == 400
    assert b"allowed are 8388608; send protobuf" in content


class Answers(Idle):
    """Answers requests with these outputs."""

    def __init__(self, **outputs: np.ndarray) -> None:
        super().__init__()
        self._outputs = outputs

    async def infer(self, *_: object) -> dict[str, np.ndarray]:
        return self._outputs


ONE = b'{"tensor":[{"name":"x","elem_type":1,"shape":[1],"float_data":[1]}]}'


async def test_answers_are_json_as_protobuf_has_it() -> None:
    """But with 64-bit numbers as numbers."""
    floats = np.array([0.5, np.nan, -np.inf, 1e30], np.float32)
    ints = np.array([-(2**63), 2**63 - 1])
    many = np.arange(200_000, dtype=np.float64)
    requests = Answers(floats=floats, ints=ints, many=many, bytes=np.arange(3, dtype=np.uint8), none=many[:0])
    status, content = await answer_of(ONE, "application/json", requests=requests)
    assert status == 200
    (output,) = json.loads(content)["outputs"]
    of = {tensor["name"]: tensor for tensor in output["tensor"]}
    assert of["floats"]["float_data"] == [0.5, "NaN", "-Infinity", float(np.float32(1e30))]
    assert of["ints"]["int64_data"] == ints.tolist()
    assert of["many"]["float64_data"] == many.tolist()
    assert of["bytes"]["tensor_content"] == "AAEC"
    assert of["none"]["shape"] == [0]


async def test_an_answer_has_as_much_json_as_over_the_other_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is not made in the event loop, where other clients would wait for it."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(paddle_server, "check_size", lambda *_: threads.append(threading.current_thread()))
    status, _ = await answer_of(ONE, "application/json", requests=Answers(x=np.ones(10)))
    assert status == 200
    assert threads
    assert threading.main_thread() not in threads
    monkeypatch.undo()
    monkeypatch.setattr(paddle_server, "JSON_LIMIT", 1000)
    status, content = await answer_of(ONE, "application/json", requests=Answers(x=np.ones(1000)))
    assert (status, b"allowed are 1000" in content) == (400, True)


async def test_empty_tensors_are_refused_over_http() -> None:
    """Each is two bytes long, or three as JSON, and takes 165 in memory."""
    for content, kind in (
        (b"\x0a\x00" * 100_000, "application/proto"),
        (b'{"tensor":[' + b"{}," * 100_000 + b"{}]}", "application/json"),
    ):
        status, found = await answer_of(content, kind)
        assert status == 400
        assert b"the request has more than 32768" in found


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - what other tasks do sets no event
        await asyncio.sleep(0.01)


def head_of(size: int) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (GENERAL_PATH.encode(), size)


def frame_of(size: int) -> bytes:
    return pack_frame(RPC["RpcMeta"](correlation_id=1), bytes(size))


@pytest.mark.parametrize("head", [head_of(4 << 20), frame_of(4 << 20)[: FRAME.size + 2]], ids=["http", "brpc"])
async def test_bodies_take_memory_as_they_come_and_no_more_than_there_is(head: bytes) -> None:
    """What a head announces takes none; a body without room is refused, and all is free once its client has gone."""
    requests: Any = Idle(most=3 << 20)
    async with (
        asyncio.timeout(LIMIT_S),
        serving_paddle(GeneralModelService(requests, ["x"]), "127.0.0.1", 0) as port,
    ):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for reader, writer in clients[:2]:
            writer.write(head + bytes(1 << 20))
            del reader
        await until(lambda: requests.memory.size >= 2 << 20)
        assert requests.memory.size < 3 << 20
        reader, writer = clients[2]
        writer.write(head + bytes(2 << 20))
        try:
            found = await reader.read()
        except ConnectionResetError:  # it was aborted while bytes were on their way
            found = b""
        assert found == b"" or (found.startswith(b"HTTP/1.1 503 ") and b"no room for the request" in found)
        for _, writer in clients:
            writer.transport.abort()
        await until(lambda: requests.memory.size == 0)


async def test_a_slow_body_makes_room_for_one_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client is disconnected."""
    monkeypatch.setattr(other_body, "STALL_CHECK_S", 0.0)
    requests: Any = Sums(most=12 << 20)
    request = GENERAL["Request"]()
    fill_tensor(request.tensor.add(name="x", alias_name="x"), np.ones(1 << 18, np.float32))
    content = request.SerializeToString()
    async with (
        asyncio.timeout(LIMIT_S),
        serving_paddle(GeneralModelService(requests, ["x"]), "127.0.0.1", 0) as port,
        aiohttp.ClientSession() as client,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head_of(100 << 20) + bytes(10 << 20))
        await until(lambda: requests.memory.size >= 10 << 20)
        async with client.post(f"http://127.0.0.1:{port}{GENERAL_PATH}", data=io.BytesIO(content)) as answer:
            assert answer.status == 200
        assert await reader.read() == b""
        writer.close()


async def test_a_client_that_disconnects_leaves_neither_its_body_nor_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The body was kept by its error until Python looked for cycles, which it seldom does."""
    requests: Any = Idle()
    async with (
        asyncio.timeout(LIMIT_S),
        serving_paddle(GeneralModelService(requests, ["x"]), "127.0.0.1", 0) as port,
    ):
        gc.disable()
        tracemalloc.start()
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head_of(20 << 20) + bytes(16 << 20))
            await until(lambda: requests.memory.size >= 16 << 20)
            writer.transport.abort()
            await until(lambda: requests.memory.size == 0)
            assert tracemalloc.get_traced_memory()[0] < 8 << 20
        finally:
            tracemalloc.stop()
            gc.enable()
    assert "Traceback" not in caplog.text
