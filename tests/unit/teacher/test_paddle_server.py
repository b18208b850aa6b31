"""The port for clients of Paddle Serving: what it does before a request is there."""

from __future__ import annotations

import asyncio
from typing import Any

from edl_runtime.protocol.paddle_serving import FRAME, RPC, frame_sizes, pack_frame
from edl_runtime.teacher.paddle_server import GeneralModelService, serving_paddle

LIMIT_S = 60.0
NO_REQUESTS: Any = None
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
