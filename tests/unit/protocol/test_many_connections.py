"""Clients of our HTTP servers that open hundreds of connections before they ask."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from edl_runtime.protocol.asgi_server import open_listener, serving
from edl_runtime.protocol.listener import MAX_NEW_CONNECTIONS


async def test_all_are_answered() -> None:
    """As those of asynchronous trainers do at each step; without TLS such connections take little memory."""

    async def hello(_: object) -> Response:
        return Response()

    many = MAX_NEW_CONNECTIONS + 50
    listener = open_listener("127.0.0.1", 0)
    async with serving(Starlette(routes=[Route("/", hello)]), listener, connections=2 * many):
        streams = [await asyncio.open_connection(*listener.getsockname()) for _ in range(many)]
        for _ in range(5 * many):  # until the server has accepted all: one a turn
            await asyncio.sleep(0)
        for _, writer in streams:
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert {await reader.readline() for reader, _ in streams} == {b"HTTP/1.1 200 OK\r\n"}
        for _, writer in streams:
            writer.close()
