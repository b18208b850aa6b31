"""A connection to Redis by TLS whose end fails no work. Imported with the first one only, because it imports redis."""

from __future__ import annotations

from typing import Any

from redis.asyncio.connection import SSLConnection
from redis.exceptions import TimeoutError as NoAnswerError


class TlsConnection(SSLConnection):
    """A connection that is cut where the other side does not answer its end.

    A proxy between, as `kubectl port-forward`, may not pass that on. All commands have been answered by then, so the
    TimeoutError that the library raises is none of the work's.
    """

    async def disconnect(self, *args: Any, **options: Any) -> None:
        """Disconnect from Redis; never raises for lack of an answer."""
        writer = self._writer
        try:
            await super().disconnect(*args, **options)
        except NoAnswerError:
            if writer:
                writer.transport.abort()
