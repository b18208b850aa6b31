"""Streams that a gateway hands on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edl_runtime.gateway.app import _Routes
from edl_runtime.gateway.gateway import Gateway
from edl_runtime.protocol.asgi_server import open_listener, serving


class EndlessPool:
    """A pool whose teacher sends one event, and then nothing more."""

    async def stream(self, _: object) -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        await asyncio.Event().wait()


class EndlessGateway:
    """A gateway that has it under every name."""

    wait_s = 0.0

    def __init__(self) -> None:
        self.pools: dict[str, Any] = {}

    @asynccontextmanager
    async def pool(self, _: str) -> AsyncIterator[EndlessPool]:
        yield EndlessPool()


async def test_a_stream_that_is_cut_as_the_gateway_stops_ends_with_an_error() -> None:
    """Its caller would take what it has for a whole answer, or for a failure of its network."""
    routes = _Routes(cast("Gateway", EndlessGateway()))

    async def answer(request: Request) -> Response:
        return await routes.begin(request, cast("Any", None))

    listener = open_listener("127.0.0.1", 0)
    app = Starlette(routes=[Route("/{pool}", answer)])
    async with serving(app, listener, connections=2, finish_s=0.0):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET /math HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"data: 1\n\n")
    rest = await reader.read()
    writer.close()
    assert b'data: {"error":{"message":"the gateway has stopped' in rest
    assert b"0\r\n\r\n" not in rest
