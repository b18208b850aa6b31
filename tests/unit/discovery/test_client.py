"""A student behind an endpoint that does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from support.registry.followers import failure_of, student, wait_for_log

from edl_runtime.discovery import client
from edl_runtime.discovery.assignments import Assignment
from edl_runtime.discovery.client import LINE_LIMIT
from edl_runtime.discovery.errors import DiscoveryNotReadyError, DiscoveryRefusedError, DiscoveryUnavailableError
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings

PACKED = b"Content-Encoding: gzip\r\n"


class FakeEndpoint:
    """Answers each stream with `head`, the lines of `told`, and silence, or blanks if it `drips`.

    A stream ends when `dropped` is set anew.
    """

    def __init__(self) -> None:
        self.head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
        self.told: list[tuple[str, ...]] = []
        self.body = b""
        self.drips = False
        self.answering: list[Any] = []
        self.streams = 0
        self.dropped = asyncio.Event()
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.answering.append(asyncio.current_task())
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                asked = await reader.readuntil(b"\r\n\r\n")
                if asked.startswith(b"PUT "):
                    writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
                else:
                    self.streams += 1
                    lines = [msgspec.json.encode(Assignment(one, students=1, listed=9)) + b"\n" for one in self.told]
                    writer.write(self.head + b"".join(lines) + self.body)
                    await writer.drain()
                    while self.drips:
                        writer.write(b" ")
                        await writer.drain()
                        await asyncio.sleep(0.01)
                    await self.dropped.wait()
        finally:
            writer.close()

    def drop(self) -> None:
        self.dropped.set()
        self.dropped = asyncio.Event()


@pytest.fixture
async def endpoint() -> AsyncIterator[FakeEndpoint]:
    made = FakeEndpoint()
    server = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield made
    server.close()
    for answering in made.answering:
        answering.cancel()
    await asyncio.gather(*made.answering, return_exceptions=True)


async def test_a_student_reconnects_to_a_silent_endpoint(
    endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped keeps its connections: the student says so, keeps its teachers and asks anew."""
    monkeypatch.setattr(client, "SILENT_AFTER_S", 0.5)
    endpoint.told = [("a:1",)]
    with capture_logs() as logs:
        async with student(RuntimeSettings(discovery_url=endpoint.url)) as one:
            await wait_for_log(logs, "discovery.unavailable")
            endpoint.told = [("a:1",), ("a:1", "b:1")]
            await wait_for_log(logs, "discovery.recovered")
            await one.wait_for(lambda teachers: teachers == ("a:1", "b:1"))
    assert all(teachers for _, teachers in one.updates)
    away = [log for log in logs if log["event"] == "discovery.unavailable"]
    assert away[0]["cause"] == "no answer in time"


async def test_an_empty_list_after_a_reconnect_counts_after_a_while(
    endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Redis may have been emptied, and its teachers are about to register anew."""
    monkeypatch.setattr(client, "SILENT_AFTER_S", 3600.0)
    monkeypatch.setattr(client, "SETTLE_S", 3600.0)
    endpoint.told = [("a:1",)]
    with capture_logs() as logs:
        async with student(RuntimeSettings(discovery_url=endpoint.url)) as one:
            await one.wait_for(lambda teachers: teachers == ("a:1",))
            endpoint.told = [(), ("b:1",)]
            endpoint.drop()
            await one.wait_for(lambda teachers: teachers == ("b:1",))
            assert [teachers for _, teachers in one.updates] == [("a:1",), ("b:1",)]
            monkeypatch.setattr(client, "SETTLE_S", -1.0)
            endpoint.told = [()]
            endpoint.drop()
            await one.wait_for(lambda teachers: teachers == ())
    about = [log for log in logs if log["event"].startswith("discovery.")]
    assert [log["event"] for log in about] == ["discovery.unavailable", "discovery.recovered"] * 2
    assert about[0]["cause"] == "it ended the stream"


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (b"200 OK", b'{"error":"\xff"}\n', "its answer can't be read"),
        (b"200 OK", b'{"x":' + b"[" * 100_000 + b"\n", "its answer can't be read"),
        (b"200 OK", b" " * (LINE_LIMIT + 1), "a line of more than 1048576 bytes"),
        (b"404 Not Found", b'{"error":"\xff"}\n', "it is not a discovery endpoint"),
        (b"404 Not Found", b'{"x":' + b"[" * 10_000, "it is not a discovery endpoint"),
        (b"404 Not Found", b"<html>", "it is not a discovery endpoint"),
    ],
)
async def test_a_stranger_instead_of_an_endpoint_is_refused(
    endpoint: FakeEndpoint, status: bytes, body: bytes, said: str
) -> None:
    """Whatever bytes come, the student raises what it always raises."""
    endpoint.head, endpoint.body = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status, len(body)), body
    error = await failure_of(RuntimeSettings(discovery_url=endpoint.url))
    assert isinstance(error, DiscoveryRefusedError)
    assert error.status == int(status[:3])
    assert said in str(error)


@pytest.mark.parametrize("body", [b"{", b'"\xff"', b'[{"x":' + b"[" * 100_000])
async def test_an_unreadable_list_of_pools_is_refused(endpoint: FakeEndpoint, body: bytes) -> None:
    """By the error of an endpoint that is none."""
    endpoint.head, endpoint.body = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body
    async with client.DiscoveryClient(endpoint.url, token="") as made:
        with pytest.raises(DiscoveryRefusedError, match="its answer can't be read"):
            await made.pools()


async def test_a_list_of_pools_has_a_limit(endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its URL leads to; what comes packed, which nobody asked for, is not unpacked."""
    monkeypatch.setattr(client, "ANSWER_LIMIT", 1_000_000)
    packed = gzip.compress(b" " * 50_000_000)
    async with client.DiscoveryClient(endpoint.url, token="") as made:
        for more, body, said in ((b"", b" " * 1_000_001, "more than 1000000 bytes"), (PACKED, packed, "can't be read")):
            head = b"HTTP/1.1 200 OK\r\n%bConnection: close\r\nContent-Length: %d\r\n\r\n"
            endpoint.head, endpoint.body = head % (more, len(body)), body
            tracemalloc.start()
            try:
                with pytest.raises(DiscoveryRefusedError, match=said):
                    await made.pools()
                _, most = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert most < 20_000_000


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 500 Oh\r\n\r\n"])
async def test_an_answer_that_never_ends_is_none(
    endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    """Though a byte comes now and then, in its head or its body."""
    endpoint.head = head
    endpoint.drips = True
    monkeypatch.setattr(client, "ANSWER_WITHIN_S", 0.3)
    async with client.DiscoveryClient(endpoint.url, token="") as made, asyncio.timeout(60):
        with pytest.raises(DiscoveryNotReadyError, match="no answer in time"):
            await made.pools()


async def test_a_missing_endpoint_at_the_start_is_an_error() -> None:
    """At once, with its URL."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        error = await failure_of(RuntimeSettings(discovery_url=url, discovery_token="t0ken"))
    assert isinstance(error, DiscoveryUnavailableError)
    assert url in str(error)
    assert "EDL_DISCOVERY_URL" in str(error)
    assert "t0ken" not in str(error)


@pytest.mark.parametrize(
    "url", ["redis://h:1", "h:1", "http://", "http://user:t0ken@h:1", "//t0ken@", "http://h:port", "http://[h"]
)
async def test_an_invalid_url_is_refused(url: str) -> None:
    """A password in it is not shown: the token has a variable of its own."""
    error = await failure_of(RuntimeSettings(discovery_url=url))
    assert isinstance(error, SpecError)
    assert "discovery_url" in str(error)
    assert "t0ken" not in str(error)
