"""Downloads of logs, which make room for others where a client hardly reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from fastapi.responses import StreamingResponse
from starlette.types import Message, Send

LEAST_BYTES_A_S = 32 << 10
PAUSE_S = 30.0
"""A client may read nothing for so long, if it reads LEAST_BYTES_A_S before and after."""

BREAKS_OFF = (
    f"[This download breaks off here: it was read more slowly than {LEAST_BYTES_A_S >> 10} KiB/s, and others wait.]\n"
)
"""The last line of such a file: behind Airflow's own layers a connection can't be broken off."""


class _SlowClientError(Exception):
    """Raised when a client reads less than it has to."""


class LogDownload(StreamingResponse):
    """A text that is closed for a client that does not read it in time. What is left to be sent is one line."""

    def __init__(self, content: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(content, headers=headers, media_type="text/plain; charset=utf-8")
        self._content = content

    async def stream_response(self, send: Send) -> None:
        """Send the text."""
        loop = asyncio.get_running_loop()
        left_s = PAUSE_S

        async def send_in_time(message: Message) -> None:
            nonlocal left_s
            left_s = min(PAUSE_S, left_s + len(message.get("body", b"")) / LEAST_BYTES_A_S)
            began = loop.time()
            try:
                async with asyncio.timeout(left_s):
                    await send(message)
            except TimeoutError:
                raise _SlowClientError from None
            left_s -= loop.time() - began

        try:
            async with aclosing(self._content):
                await super().stream_response(send_in_time)
        except _SlowClientError:
            await send({"type": "http.response.body", "body": BREAKS_OFF.encode(), "more_body": False})
