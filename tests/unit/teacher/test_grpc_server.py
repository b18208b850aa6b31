"""The gRPC server, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.oip_grpc import MESSAGES, SERVICE
from edl_runtime.protocol.paddle_serving import GENERAL_SERVICE
from edl_runtime.teacher.grpc_server import GrpcService, serving_grpc
from edl_runtime.teacher.metrics import TeacherMetrics
from edl_runtime.teacher.paddle_server import GeneralModelService, serving_paddle

LIMIT_S = 60.0


class Idle:
    """A model that nobody asks."""

    draining = False
    address = "here"


IDLE: Any = Idle()


def oip() -> Any:
    service = GrpcService(ModelSignature(name="net"), IDLE, TeacherMetrics(), token="secret")
    return serving_grpc(service, "127.0.0.1:0", None)


def paddle() -> Any:
    return serving_paddle(GeneralModelService(IDLE, ["x"], "secret"), "127.0.0.1", 0)


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
