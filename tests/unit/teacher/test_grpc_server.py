"""The gRPC server, without a model."""

from __future__ import annotations

import asyncio
import gc
import gzip
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.oip_grpc import MESSAGES, SERVICE
from edl_runtime.protocol.paddle_serving import GENERAL_SERVICE
from edl_runtime.teacher import grpc_server
from edl_runtime.teacher.grpc_server import SERVER_OPTIONS, GrpcService, serving_grpc
from edl_runtime.teacher.http.admission import MOST_UNSEEN, SideMemory
from edl_runtime.teacher.metrics import TeacherMetrics
from edl_runtime.teacher.paddle_server import GeneralModelService, serving_paddle

LIMIT_S = 60.0


class Idle:
    """A model that nobody asks."""

    draining = False
    address = "here"

    def __init__(self, most: int = 1 << 20) -> None:
        self.memory = SideMemory(most)


def oip(requests: Any = None) -> Any:
    service = GrpcService(ModelSignature(name="net"), requests or Idle(4 << 20), TeacherMetrics(), token="secret")
    return serving_grpc(service, "127.0.0.1:0", None)


def paddle(requests: Any = None) -> Any:
    return serving_paddle(GeneralModelService(requests or Idle(4 << 20), ["x"], "secret"), "127.0.0.1", 0)


async def never() -> AsyncIterator[bytes]:
    """Messages that a client will send, some time."""
    await asyncio.Event().wait()
    yield b""


@pytest.mark.parametrize(
    ("serving", "method"),
    [
        (oip, f"{SERVICE}/ModelInfer"),
        (oip, f"{SERVICE}/ModelReady"),
        (paddle, f"{GENERAL_SERVICE}/inference"),
        (paddle, f"{GENERAL_SERVICE}/debug"),
    ],
)
async def test_a_client_without_the_token_is_refused_before_its_message_comes(
    serving: Callable[[], Any], method: str
) -> None:
    """Its message would be kept in memory."""
    for given in ([("authorization", "Bearer wrong")], []):
        async with (
            asyncio.timeout(LIMIT_S),
            serving() as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.stream_unary(f"/{method}")(never(), metadata=given)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "EDL_TEACHER_TOKEN" in refused.value.details()


@pytest.mark.parametrize("method", ["ServerLive", "ServerReady"])
async def test_health_needs_neither_token_nor_message(method: str) -> None:
    async with asyncio.timeout(LIMIT_S), oip() as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        content = await channel.stream_unary(f"/{SERVICE}/{method}")(never())
    assert content == MESSAGES["ServerLive"](live=True).SerializeToString()


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_compressed_message_is_read_and_has_a_limit(
    compression: grpc.Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some kilobytes may be any number of gigabytes when they are unpacked."""
    monkeypatch.setattr("edl_runtime.protocol.compression.UNPACKED_LIMIT", 1_000_000)
    async with (
        asyncio.timeout(LIMIT_S),
        oip() as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", compression=compression) as channel,
    ):
        ready = channel.unary_unary(f"/{SERVICE}/ModelReady")
        token = [("authorization", "Bearer secret")]
        named = MESSAGES["Model"](name="net").SerializeToString()
        assert MESSAGES["ModelReady"].FromString(await ready(named, metadata=token)).ready
        with pytest.raises(grpc.aio.AioRpcError, match="more than 1000000 bytes") as refused:
            await ready(bytes(1_000_001), metadata=token)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


TOKEN = [("authorization", "Bearer secret")]


@pytest.mark.parametrize(("serving", "method"), [(oip, f"{SERVICE}/ModelInfer"), (paddle, f"{GENERAL_SERVICE}/debug")])
async def test_a_message_that_takes_too_much_memory_is_refused_and_frees_it(
    serving: Callable[[Any], Any], method: str
) -> None:
    """Some kilobytes of empty tensors took gigabytes, and others waited for their end."""
    requests = Idle(most=2 << 20)
    empty, whole = gzip.compress(b"\x32\x00" * 1_000_000), bytes(1 << 20)
    async with (
        asyncio.timeout(LIMIT_S),
        serving(requests) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        ask = channel.unary_unary(f"/{method}")
        for content, words, code in (
            (b"\x32\x00" * 100_000, "more than 32768 fields", grpc.StatusCode.INVALID_ARGUMENT),
            (empty, "more than 32768 fields", grpc.StatusCode.INVALID_ARGUMENT),
            (b"\x3a\x80\x80\x40" + whole, "allowed are 2097152", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
                await ask(content, metadata=TOKEN)
            assert refused.value.code() is code
        assert requests.memory.size == 0


async def test_messages_that_do_not_come_free_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limited number is received at a time, as gRPC shows none before it is complete."""
    monkeypatch.setattr(grpc_server, "RECEIVE_S", 0.2)
    async with (
        asyncio.timeout(LIMIT_S),
        oip() as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        ready = f"/{SERVICE}/ModelReady"
        silent = [channel.stream_unary(ready)(never(), metadata=TOKEN) for _ in range(MOST_UNSEEN)]
        named = MESSAGES["Model"](name="net").SerializeToString()
        assert await channel.unary_unary(ready)(named, metadata=TOKEN)
        for call in silent:
            with pytest.raises(grpc.aio.AioRpcError, match=r"did not come within") as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_message_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [option for option in SERVER_OPTIONS if "receive" not in option[0]]
    monkeypatch.setattr(grpc_server, "SERVER_OPTIONS", [*options, ("grpc.max_receive_message_length", 1000)])
    async with (
        asyncio.timeout(LIMIT_S),
        oip() as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        ready = channel.unary_unary(f"/{SERVICE}/ModelReady")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ready(bytes(1001), metadata=TOKEN)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await ready(MESSAGES["Model"](name="net").SerializeToString(), metadata=TOKEN)


async def test_a_refused_message_is_not_kept_by_its_error() -> None:
    """The library keeps what ends a call, until Python looks for cycles."""
    content = b"\x3a\x80\x80\x80\x04" + bytes(8 << 20)
    gc.disable()
    try:
        async with (
            asyncio.timeout(LIMIT_S),
            oip(Idle(most=64 << 20)) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.max_send_message_length", -1)]) as channel,
        ):
            tracemalloc.start()
            for _ in range(3):
                with pytest.raises(grpc.aio.AioRpcError, match="there is no model"):
                    await channel.unary_unary(f"/{SERVICE}/ModelInfer")(content, metadata=TOKEN)
            assert tracemalloc.get_traced_memory()[0] < 12 << 20
    finally:
        tracemalloc.stop()
        gc.enable()
