"""A TLS front before a plain HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

from support.network.certificates import Shown


@contextlib.asynccontextmanager
async def tls_front(port: int, shown: Shown) -> AsyncIterator[str]:
    """Forward to that port of this machine; give the URL."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*shown)

    forwarding: set[asyncio.Task[None]] = set()

    def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        forwarding.add(asyncio.create_task(_forward(reader, writer, port)))

    async with await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context) as server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(10):
            await asyncio.gather(*forwarding)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    back_reader, back_writer = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.gather(_copy(reader, back_writer), _copy(back_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
