"""What is in Redis, for scripts without asyncio: calls that block, and are repeated while Redis is unavailable."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, Self, TypeVar

from edl_runtime.log import get_logger
from edl_runtime.shards.errors import ForkedLedgerError
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect

if TYPE_CHECKING:
    from redis.asyncio import Redis

RETRY_EVERY_S = 0.25
WAIT_S = 60.0

P = ParamSpec("P")
T = TypeVar("T")
Target = TypeVar("Target")

log = get_logger(__name__)


def blocking(
    method: Callable[Concatenate[Target, P], Awaitable[T]],
) -> Callable[Concatenate[Blocking[Target], P], T]:
    """Return the method that runs this one of the target, and waits for its end."""

    @functools.wraps(method)
    def call(self: Blocking[Target], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.call(method, *args, **kwargs)

    return call


class Blocking(Generic[Target]):
    """Methods of a target without `await`, for any thread. A context manager; `close` ends its own thread.

    While Redis is unavailable a call is repeated for up to `wait_s`, which may be changed meanwhile, then raises
    RegistryUnavailableError; the target's methods have to count once when they are repeated. Raises SpecError as
    `connect` does, and ForkedLedgerError in a forked child.
    """

    def __init__(
        self, redis_url: str, job: str, worker: str, make: Callable[[Redis], Target], *, wait_s: float
    ) -> None:
        self.job = job
        self._worker = worker
        self._process = os.getpid()
        self.wait_s = wait_s
        self._client = connect(redis_url)
        self._target = make(self._client)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="edl ledger", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made it, where it can't be used."""
        return os.getpid() != self._process

    def call(self, method: Callable[Concatenate[Target, P], Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run this method of the target in the thread, and return what it returns."""
        if self.forked:
            raise ForkedLedgerError(self.job, self._worker)
        ask = functools.partial(method, self._target, *args, **kwargs)
        return asyncio.run_coroutine_threadsafe(self._retry(method.__name__, ask), self._loop).result()

    def close(self) -> None:
        """Close the connection and end the thread; may be called again. Does nothing in a forked child."""
        if self._loop.is_closed() or self.forked:
            return
        asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _retry(self, method: str, ask: Callable[[], Awaitable[T]]) -> T:
        began_at = time.monotonic()
        away = False
        while True:
            try:
                answer = await ask()
            except RegistryUnavailableError as error:
                if time.monotonic() + RETRY_EVERY_S > began_at + self.wait_s:
                    raise
                if not away:
                    log.warning(
                        "ledger.unavailable", job=self.job, call=method, address=error.address, cause=error.cause
                    )
                away = True
                await asyncio.sleep(RETRY_EVERY_S)
            else:
                if away:
                    log.info("ledger.recovered", job=self.job)
                return answer
