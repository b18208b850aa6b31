"""A ledger for a training script, which knows nothing of asyncio: each call waits for its answer, and for Redis."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Self, TypeVar

from edl_runtime.errors import ForkedLedgerError, RegistryUnavailableError
from edl_runtime.log import get_logger
from edl_runtime.shards.ledger import ONE_EPOCH, Ledger
from edl_runtime.shards.state import LedgerReport, LedgerState, Plan, Shard
from edl_runtime.store.client import connect

RETRY_EVERY_S = 0.25

Answer = TypeVar("Answer")

log = get_logger(__name__)


class BlockingLedger:
    """`Ledger`'s methods without `await`, for any thread. A context manager; `close` ends its own thread.

    While Redis is away a call tries again for up to `wait_s`, then raises RegistryUnavailableError: whatever is done
    twice by that counts once. Raises SpecError as `Ledger` and `connect` do, and
    ForkedLedgerError in a process that was forked from the one that made it.
    """

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        job: str,
        *,
        worker: str,
        shards: Sequence[str] | None = None,
        plan: Plan = ONE_EPOCH,
        wait_s: float = 60.0,
    ) -> None:
        self.job = job
        self._worker = worker
        self._process = os.getpid()
        self._wait_s = wait_s
        self._client = connect(redis_url)
        self._ledger = Ledger(self._client, namespace, job, worker=worker, shards=shards, plan=plan)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="edl ledger", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def generation(self) -> int:
        return self._ledger.generation

    def begin(self, generation: int) -> set[int]:
        return self._call("begin a generation", lambda: self._ledger.begin(generation))

    def restore(self, state: LedgerState | None, generation: int) -> None:
        self._call("restore the ledger", lambda: self._ledger.restore(state, generation))

    def lease(self, most: int = 1) -> list[Shard] | None:
        return self._call("lease shards", lambda: self._ledger.lease(most))

    def ack(self, shards: Collection[Shard], step: int) -> None:
        self._call("acknowledge shards", lambda: self._ledger.ack(shards, step))

    def fail(self, shard: Shard, reason: str, *, applied: int = 0) -> bool:
        return self._call("give back a shard", lambda: self._ledger.fail(shard, reason, applied=applied))

    def release(self, step: int, positions: Mapping[int, int], alive: Iterable[str], *, failed: str = "") -> int:
        workers = list(alive)
        return self._call("take back shards", lambda: self._ledger.release(step, positions, workers, failed=failed))

    def commit(self, step: int, positions: Mapping[int, int]) -> LedgerState:
        return self._call("commit a step", lambda: self._ledger.commit(step, positions))

    def add(self, shards: Sequence[str], *, first: int) -> None:
        self._call("add shards", lambda: self._ledger.add(shards, first=first))

    def close_stream(self) -> None:
        self._call("close a stream", self._ledger.close_stream)

    def report(self) -> LedgerReport:
        return self._call("read the ledger", self._ledger.report)

    def close(self) -> None:
        """Let go of Redis and end the thread; may be called again. No other method works afterwards.

        In a forked child it does nothing: both are its parent's.
        """
        if self._loop.is_closed() or os.getpid() != self._process:
            return
        asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, what: str, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        if os.getpid() != self._process:
            raise ForkedLedgerError(self.job, self._worker)
        return asyncio.run_coroutine_threadsafe(self._persist(what, ask), self._loop).result()

    async def _persist(self, what: str, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        give_up_at = time.monotonic() + self._wait_s
        away = False
        while True:
            try:
                answer = await ask()
            except RegistryUnavailableError as error:
                if time.monotonic() + RETRY_EVERY_S > give_up_at:
                    raise
                if not away:
                    log.warning("ledger.waits", job=self.job, to=what, address=error.address, cause=error.cause)
                away = True
                await asyncio.sleep(RETRY_EVERY_S)
            else:
                if away:
                    log.info("ledger.goes_on", job=self.job)
                return answer
