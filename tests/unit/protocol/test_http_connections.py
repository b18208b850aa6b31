"""Clients of our HTTP servers that open hundreds of connections before they ask, and those that read slowly."""

from __future__ import annotations

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from edl_runtime.protocol import asgi_server
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


async def test_an_answer_that_is_read_slowly_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose answer still waits to be sent is not idle, though the application has ended."""
    monkeypatch.setattr(asgi_server, "IDLE_S", 0.1)
    size = 32 << 20  # more than the buffers of both sides take

    async def answer(_: object) -> Response:
        return Response(b"x" * size)

    listener = open_listener("127.0.0.1", 0)
    async with serving(Starlette(routes=[Route("/", answer)]), listener, connections=2):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(1.0)  # several looks for idle connections
        assert len(await reader.readexactly(size)) == size
        writer.close()


async def test_answers_through_a_throttled_relay_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer for each than connections may be idle, and several share it."""
    monkeypatch.setattr(asgi_server, "IDLE_S", 0.1)
    size = 8 << 20

    async def answer(_: object) -> Response:
        return Response(b"x" * size)

    listener = open_listener("127.0.0.1", 0)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(*listener.getsockname(), limit=1 << 16)
        to_server.write(await reader.readuntil(b"\r\n\r\n"))
        while piece := await from_server.read(1 << 16):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)  # 13 MB/s at most
        writer.close()
        to_server.close()

    async def ask() -> int:
        reader, writer = await asyncio.open_connection(*relaying.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        content = await reader.read()
        writer.close()
        return len(content)

    async with (
        serving(Starlette(routes=[Route("/", answer)]), listener, connections=8),
        await asyncio.start_server(relay, "127.0.0.1", 0) as relaying,
    ):
        assert set(await asyncio.gather(*(ask() for _ in range(4)))) == {size}


async def test_connections_are_kept_for_longer_than_clients_keep_theirs() -> None:
    """Of 200 clients that ask again after six seconds, a second later than httpx would, none meets a closed one."""

    async def hello(_: object) -> Response:
        return Response()

    listener = open_listener("127.0.0.1", 0)
    async with serving(Starlette(routes=[Route("/", hello)]), listener, connections=300):
        streams = [await asyncio.open_connection(*listener.getsockname()) for _ in range(200)]
        for asks_again in (False, True):
            if asks_again:
                await asyncio.sleep(6.0)
            for _, writer in streams:
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            for reader, _ in streams:
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        for _, writer in streams:
            writer.close()
