"""Clients of our HTTP servers: hundreds before they ask, slow readers, and bodies of small chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from edl_runtime.protocol import asgi_server
from edl_runtime.protocol.asgi_server import CHUNKS_A_TURN, MOST_SMALL_CHUNKS, SMALL_CHUNK, open_listener, serving
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


async def exchange(answer: Callable[[Request], Awaitable[Response]], body: bytes) -> bytes:
    """Return what a server answers to a body in chunks, until it closes the connection."""
    listener = open_listener("127.0.0.1", 0)
    app = Starlette(routes=[Route("/", answer, methods=["POST"])])
    async with serving(app, listener, connections=2):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        answered = await reader.read()
        writer.close()
    return answered


async def test_a_body_of_small_chunks_leaves_turns_to_others() -> None:
    """However many of them come at once, a few are parsed in each turn of the event loop, and all arrive."""
    pieces: list[bytes] = []

    async def answer(request: Request) -> Response:
        pieces.extend([piece async for piece in request.stream()])
        return Response()

    answered = await exchange(answer, b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n")
    assert answered.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"".join(pieces) == b"x" * 5000
    assert max(map(len, pieces)) <= 2 * CHUNKS_A_TURN  # the application may have missed a turn


async def test_a_body_of_too_many_small_chunks_is_refused() -> None:
    """It is told why, and nothing more of it is parsed."""
    seen = bytearray()

    async def answer(request: Request) -> Response:
        async for piece in request.stream():
            seen.extend(piece)
        return Response()

    body = b"1\r\nx\r\n" * 2 * MOST_SMALL_CHUNKS
    answered = await exchange(answer, body)
    assert answered.startswith(b"HTTP/1.1 400 ")
    assert b"the body's first 10001 chunks have 10001 bytes, allowed are 64 or more in each on the average" in answered
    assert len(seen) <= MOST_SMALL_CHUNKS


async def test_small_chunks_behind_an_answer_close_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """As where a token is missing: the answer is there, and what the server has not read is no error of its own."""

    async def stream(_: Request) -> Response:
        async def never_ends() -> AsyncIterator[bytes]:
            yield b"begun"
            await asyncio.Event().wait()

        return StreamingResponse(never_ends(), 401)

    answered = await exchange(stream, b"1\r\nx\r\n" * (MOST_SMALL_CHUNKS + 1))
    assert answered.startswith(b"HTTP/1.1 401 ")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_body_of_many_larger_chunks_arrives_whole() -> None:
    """Their number is not limited."""

    async def answer(request: Request) -> Response:
        return Response(str(len(await request.body())))

    chunk = b"%x\r\n%b\r\n" % (SMALL_CHUNK, b"x" * SMALL_CHUNK)
    answered = await exchange(answer, chunk * 2 * MOST_SMALL_CHUNKS + b"0\r\n\r\n")
    assert answered.endswith(str(2 * MOST_SMALL_CHUNKS * SMALL_CHUNK).encode())


@pytest.mark.parametrize(
    ("version", "lengths", "told"),
    [
        ("1.1", ["Content-Length: 3", "Transfer-Encoding: chunked"], b"both Content-Length and Transfer-Encoding"),
        ("1.0", ["Transfer-Encoding: chunked"], b"Transfer-Encoding, which HTTP/1.0 does not know"),
    ],
)
async def test_a_length_that_a_proxy_may_see_otherwise_is_refused(
    version: str, lengths: list[str], told: bytes
) -> None:
    """The connection is closed, so that nothing behind it is taken for another request."""

    async def answer(_: Request) -> Response:
        return Response()

    listener = open_listener("127.0.0.1", 0)
    async with serving(Starlette(routes=[Route("/", answer, methods=["POST"])]), listener, connections=2):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        head = "\r\n".join([f"POST / HTTP/{version}", "Host: x", "Connection: keep-alive", *lengths, "", ""])
        writer.write(head.encode() + b"3\r\nabc\r\n0\r\n\r\n")
        answered = await reader.read()
        writer.close()
    assert answered.startswith(b"HTTP/1.1 400 ")
    assert told in answered
