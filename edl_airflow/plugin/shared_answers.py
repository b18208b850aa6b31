"""Answers that all viewers share for a while."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class SharedAnswers(Generic[Key, Value]):
    """Keeps answers by what was asked, `most` of them, those asked for first being dropped.

    Those who ask at a time share one answer, and its failure, which is not kept. Belongs to one event loop.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Key, tuple[float, asyncio.Future[Value]]] = OrderedDict()

    async def get(self, key: Key, ask: Callable[[], Coroutine[Any, Any, Value]], *, holds_s: float) -> Value:
        """Return the answer, asked for within the last `holds_s` seconds. Raises what `ask` raises."""
        at, found = self._kept.get(key, (0.0, None))
        if found is None or (found.done() and (_failed(found) or time.monotonic() > at + holds_s)):
            found = asyncio.ensure_future(ask())
            found.add_done_callback(_failed)  # perhaps all who asked have left
            self._kept[key] = (time.monotonic(), found)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return await asyncio.shield(found)


def _failed(answer: asyncio.Future[Any]) -> bool:
    return answer.cancelled() or answer.exception() is not None
