"""Makes asset events of checkpoints that land."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

import structlog
from airflow.triggers.base import BaseEventTrigger, TriggerEvent
from airflow.triggers.shared_stream import AdvanceItem, SharedStreamProducer

from edl_airflow.client import EdlClient, open_client
from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.operators.templates import check_stream
from edl_airflow.results import CheckpointResult
from edl_airflow.triggers.base import load_connection_eventually
from edl_runtime.store.errors import RegistryUnavailableError

if TYPE_CHECKING:
    from airflow.sdk.execution_time.context import AssetStateStoreAccessors

RETRY_EVERY_S = 2.0
"""How long to wait before Redis is asked again that was away."""

MOST_UNDER_WAY = 64
"""So many checkpoints at a time may be on their way to Airflow's database; it takes a second or two."""

log = structlog.get_logger(__name__)

StoreRequest: TypeAlias = "asyncio.Future[AssetStateStoreAccessors | None]"
"""The question to the trigger where its assets' state is, which comes before the first checkpoint."""


class EdlCheckpointTrigger(BaseEventTrigger):
    """Fires for each checkpoint that lands in a stream: a `CheckpointResult` and the `stream`.

    For an `AssetWatcher`: `Asset("digits", watchers=[AssetWatcher(name="landed", trigger=EdlCheckpointTrigger(...))])`
    makes each checkpoint an event of the asset, whose `extra["payload"]` says step, URL and metrics. The first time it
    starts with what lands from then on; later with what has landed since the last event that is in Airflow's database.
    So none is lost with a triggerer, and one may come a second time. Rides out a Redis that is away, and waits for a
    connection that is missing or wrong.

    Airflow calls it through a shared stream, for those alone are told what is in its database. Each watched stream
    costs one connection to Redis, which waits there.

    :param stream: "DAG/TASK" of an `EdlTrainOperator`, or the name of a job that was started by hand
    :param edl_conn_id: the Airflow connection of type `edl`
    """

    def __init__(self, stream: str, edl_conn_id: str = DEFAULT_CONN_ID) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream = check_stream(stream)
        self.edl_conn_id = edl_conn_id

    def serialize(self) -> tuple[str, dict[str, Any]]:
        given = {"stream": self.stream, "edl_conn_id": self.edl_conn_id}
        return "edl_airflow.triggers.checkpoint.EdlCheckpointTrigger", given

    def shared_stream_key(self) -> Hashable:
        """Equal triggers are one in Airflow, so each has a stream of its own."""
        return ("edl_checkpoints", self.edl_conn_id, self.stream)

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> CheckpointProducer:
        return CheckpointProducer(**kwargs)

    async def filter_shared_stream(
        self, shared_stream: AsyncIterator[StoreRequest | CheckpointResult]
    ) -> AsyncIterator[TriggerEvent]:
        """Fire for ever."""
        async for said in shared_stream:
            if isinstance(said, asyncio.Future):
                said.set_result(self.asset_state_store)
            else:
                yield TriggerEvent({"stream": self.stream, **said})  # type: ignore[no-untyped-call]

    def run(self) -> AsyncIterator[TriggerEvent]:
        """Not for this trigger: Airflow filters its shared stream instead."""
        raise NotImplementedError


class CheckpointProducer(SharedStreamProducer):
    """Reads a stream of checkpoints for one trigger, and keeps up to which one events are in Airflow's database."""

    def __init__(self, stream: str, edl_conn_id: str) -> None:
        self._stream = stream
        self._conn_id = edl_conn_id
        self._room = asyncio.Semaphore(MOST_UNDER_WAY)
        self._cursor: CheckpointCursor | None = None
        self._whole = True  # whether all before have become events
        self._ends = False  # what Airflow takes over as it stops counts as stored, and may not be

    async def open_stream(self) -> AsyncIterator[tuple[StoreRequest | CheckpointResult, str]]:
        """Yield the question where to keep the cursor, then each checkpoint and its id, for ever."""
        asked: StoreRequest = asyncio.get_running_loop().create_future()
        await self._room.acquire()
        yield asked, ""
        self._cursor = CheckpointCursor(await asked, self._conn_id, self._stream)
        try:
            async with open_client(await load_connection_eventually(self._conn_id)) as client:
                last_id = await self._cursor.get() or await self._end(client, self._cursor)
                while True:
                    for last_id, checkpoint in await self._landed(client, last_id):  # noqa: B020 (the next begins there)
                        if checkpoint:
                            await self._room.acquire()
                            yield checkpoint, last_id
        finally:
            self._ends = True

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Keep the id of the last of which an event is stored; from one that has failed on, the next start tries."""
        stored = list(takewhile(lambda item: item.outcome.is_clean, batch)) if self._whole and not self._ends else []
        self._whole = len(stored) == len(batch)
        for _ in batch:
            self._room.release()
        if self._cursor and stored and (last_id := stored[-1].broker_payload):
            await self._cursor.set(last_id)

    async def _end(self, client: EdlClient, cursor: CheckpointCursor) -> str:
        while True:
            try:
                last_id = await client.end_of_checkpoints(self._stream)
            except RegistryUnavailableError:
                await asyncio.sleep(RETRY_EVERY_S)
            else:
                await cursor.set(last_id)
                return last_id

    async def _landed(self, client: EdlClient, last_id: str) -> list[tuple[str, CheckpointResult | None]]:
        try:
            return await client.next_checkpoints(self._stream, last_id)
        except RegistryUnavailableError as error:
            log.warning("checkpoints.unavailable", stream=self._stream, cause=str(error))
            await asyncio.sleep(RETRY_EVERY_S)
            return []


class CheckpointCursor:
    """Up to which id of a stream events were made: one value, with each of the assets that are watched through it.

    Equal triggers are one, which may be of several assets; one that begins to watch later goes on where the others are.
    """

    def __init__(self, store: AssetStateStoreAccessors | None, conn_id: str, stream: str) -> None:
        self._key = f"last_checkpoint/{conn_id}/{stream}"
        self._kept_at = list(store._by_name.values()) if store else []  # noqa: SLF001 (nothing public names its assets)

    async def get(self) -> str:
        """Return the id, empty if there is none yet."""
        kept = [await asset.aget(self._key) for asset in self._kept_at]
        return max((each for each in kept if isinstance(each, str)), key=_entry_order, default="")

    async def set(self, last_id: str) -> None:
        """Keep the id."""
        for asset in self._kept_at:
            await asset.aset(self._key, last_id)


def _entry_order(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))
