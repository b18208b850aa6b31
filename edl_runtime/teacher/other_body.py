"""Bodies at the ports for clients of other protocols: how they come, and the memory that they take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from edl_runtime.protocol.errors import InferenceError
from edl_runtime.protocol.proto import decoded, memory_of
from edl_runtime.teacher.http.admission import (
    MAX_STALLED_CHECKS_CONTESTED,
    MIN_BYTES_CONTESTED,
    STALL_CHECK_S,
    SideMemory,
)

MESSAGE_LIMIT = 128 * 1024 * 1024
"""Most bytes of a body: one of raw tensors takes three times as much memory, for which there is room."""

RECEIVE_S = 10.0
"""Longest time in which a message comes that is not seen before it is complete, once it is its turn."""


class OtherBody:
    """A request at another port than that of HTTP: use it as a context manager, which frees its memory at the end.

    - `size`: bytes that its client has announced, if any; they take no memory.
    - `disconnect`: called when its memory is needed for others while it comes slowly.
    """

    def __init__(self, memory: SideMemory, size: int = 0, disconnect: Callable[[], None] = lambda: None) -> None:
        self._memory = memory
        self._size = size
        self._disconnect = disconnect
        self._now = asyncio.get_running_loop().time
        self._received = self._taken = 0
        self._noted = 0, self._now()  # bytes, and when they had come
        self._complete = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._memory.give_back(self)

    def receive(self, size: int) -> None:
        """Count `size` bytes more that have come. Raises InferenceError for too long a body, and without room."""
        self._received += size
        if self._received >= self._noted[0] + MIN_BYTES_CONTESTED:
            self._noted = self._received, self._now()
        self.check_size(self._received)
        self.take(size)

    def check_size(self, size: int) -> None:
        """Raise InferenceError for a body that is too long."""
        if size > MESSAGE_LIMIT:
            reason = f"the request has {size} bytes or more, allowed are {MESSAGE_LIMIT}; send it over HTTP"
            raise InferenceError("this teacher", 413, reason, retryable=False)

    def end(self) -> None:
        """Note that all of the body has come, so that it keeps its memory."""
        self._complete = True

    async def unpacked(self, content: bytes, unpack: Callable[[bytes], bytes]) -> bytes:
        """Return what `unpack` makes of the body. Raises as it does, and InferenceError without room."""
        found = await asyncio.to_thread(unpack, content)
        if found is not content:
            self.take(len(found))
        return found

    async def parsed(self, message: Any, content: bytes) -> Any:
        """Return the body as a message of the class `message`, once there is room for it and for its tensors.

        Raises ProtocolError for another one, InferenceError without room.
        """
        self.take(len(content) + await asyncio.to_thread(memory_of, message, content, "the request"))
        return await asyncio.to_thread(decoded, message, content, "the request")

    def take(self, size: int) -> None:
        """Count `size` bytes that reading the body takes. Raises InferenceError for too many, and without room."""
        self._taken += size
        if self._taken > self._memory.most:
            reason = f"the request takes {self._taken} bytes of memory, allowed are {self._memory.most}"
            raise InferenceError("this teacher", 413, f"{reason}; send raw tensors, or fewer rows", retryable=False)
        if not self._memory.grow(self, size):
            reason = "there is no room for the request beside others; send it again later, or in smaller parts"
            raise InferenceError("this teacher", 503, reason, retryable=True)

    @property
    def slow(self) -> bool:
        """Whether MIN_BYTES_CONTESTED took so long that a client of the HTTP port would lose its slot."""
        limit_s = MAX_STALLED_CHECKS_CONTESTED * STALL_CHECK_S
        return not self._complete and self._now() - self._noted[1] > limit_s

    @property
    def bytes_to_come(self) -> int:
        """Bytes of the body that have not arrived yet, as far as they are known."""
        return max(self._size - self._received, 0)

    def refuse_body(self) -> None:
        self._complete = True
        self._disconnect()
