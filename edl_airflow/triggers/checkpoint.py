"""Turns checkpoints into asset events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

import structlog
from airflow.triggers.base import BaseEventTrigger, TriggerEvent
from airflow.triggers.shared_stream import AdvanceItem, SharedStreamProducer, _reject_context

from edl_airflow.client import EdlClient, open_client
from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.operators.templates import check_stream
from edl_airflow.results import CheckpointResult
from edl_airflow.triggers.base import load_connection_eventually
from edl_runtime.store.errors import RegistryUnavailableError

if TYPE_CHECKING:
    from airflow.sdk.execution_time.context import AssetStateStoreAccessors

RETRY_EVERY_S = 2.0
"""Seconds between two tries while Redis is away."""

MOST_UNDER_WAY = 64
"""How many checkpoints may be on their way to Airflow's database at a time; each takes a second or two."""

log = structlog.get_logger(__name__)

StoreRequest: TypeAlias = "asyncio.Future[AssetStateStoreAccessors | None]"
"""First item of the stream: the producer asks its trigger for the store of its assets' state."""


@dataclass
class SavedEvent:
    """A checkpoint in the stream. `fired`: Airflow has taken its event, and will say when that is in its database."""

    id: str
    checkpoint: CheckpointResult
    fired: bool = False


class EdlCheckpointTrigger(BaseEventTrigger):
    """Fires for each new checkpoint in a stream: a `CheckpointResult` and the `stream`.

    For an `AssetWatcher`: `Asset("digits", watchers=[AssetWatcher(name="saved", trigger=EdlCheckpointTrigger(...))])`
    makes each checkpoint an event of the asset, with step, URL and metrics in `extra["payload"]`. It starts with new
    checkpoints, and after a restart with those after the last event in Airflow's database, so none is lost with a
    triggerer, but one may come twice. Tolerates a Redis outage, and waits for a connection that is missing or wrong.

    It uses a shared stream, because Airflow reports only to those which events are in its database. Each stream holds
    one connection to Redis.

    :param stream: "DAG/TASK" of an `EdlTrainOperator`, or the name of a job that was started by hand
    :param edl_conn_id: the Airflow connection of type `edl`
    """

    def __init__(self, stream: str, edl_conn_id: str = DEFAULT_CONN_ID) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream = check_stream("stream", stream)
        self.edl_conn_id = edl_conn_id

    def serialize(self) -> tuple[str, dict[str, Any]]:
        given = {"stream": self.stream, "edl_conn_id": self.edl_conn_id}
        return "edl_airflow.triggers.checkpoint.EdlCheckpointTrigger", given

    def shared_stream_key(self) -> Hashable:
        """One stream for each trigger; Airflow merges equal triggers."""
        return ("edl_checkpoints", self.edl_conn_id, self.stream)

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> CheckpointProducer:
        return CheckpointProducer(**kwargs)

    async def filter_shared_stream(
        self, shared_stream: AsyncIterator[StoreRequest | SavedEvent]
    ) -> AsyncIterator[TriggerEvent]:
        """Fire for ever."""
        async for item in shared_stream:
            if isinstance(item, asyncio.Future):
                item.set_result(self.asset_state_store)
            else:
                yield TriggerEvent({"stream": self.stream, **item.checkpoint})  # type: ignore[no-untyped-call]
                item.fired = _will_be_confirmed()

    def run(self) -> AsyncIterator[TriggerEvent]:
        """Not used: Airflow calls `filter_shared_stream` instead."""
        raise NotImplementedError


class CheckpointProducer(SharedStreamProducer):
    """Reads a stream of checkpoints for one trigger, and saves the id of the last event in Airflow's database."""

    def __init__(self, stream: str, edl_conn_id: str) -> None:
        self._stream = stream
        self._conn_id = edl_conn_id
        self._room = asyncio.Semaphore(MOST_UNDER_WAY)
        self._cursor: CheckpointCursor | None = None
        self._whole = True  # whether all events so far were stored

    async def open_stream(self) -> AsyncIterator[tuple[StoreRequest | SavedEvent, SavedEvent | None]]:
        """Yield the request for the store, then each checkpoint, for ever."""
        asked: StoreRequest = asyncio.get_running_loop().create_future()
        await self._room.acquire()
        yield asked, None
        self._cursor = CheckpointCursor(await asked, self._conn_id, self._stream)
        async with open_client(await load_connection_eventually(self._conn_id), waits=True) as client:
            last_id = await self._cursor.get() or await self._end(client, self._cursor)
            while True:
                for last_id, checkpoint in await self._next(client, last_id):  # noqa: B020 (the next begins there)
                    if checkpoint:
                        await self._room.acquire()
                        saved = SavedEvent(last_id, checkpoint)
                        yield saved, saved

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Save the id of the last stored event; after one that was not stored, the next start repeats from there."""
        stored = list(takewhile(_is_stored, batch)) if self._whole else []
        self._whole = len(stored) == len(batch)
        for _ in batch:
            self._room.release()
        if self._cursor and stored and (last := stored[-1].broker_payload):
            await self._cursor.set(last.id)

    async def _end(self, client: EdlClient, cursor: CheckpointCursor) -> str:
        while True:
            try:
                last_id = await client.end_of_checkpoints(self._stream)
            except RegistryUnavailableError:
                await asyncio.sleep(RETRY_EVERY_S)
            else:
                await cursor.set(last_id)
                return last_id

    async def _next(self, client: EdlClient, last_id: str) -> list[tuple[str, CheckpointResult | None]]:
        try:
            return await client.next_checkpoints(self._stream, last_id)
        except RegistryUnavailableError as error:
            log.warning("checkpoints.unavailable", stream=self._stream, cause=str(error))
            await asyncio.sleep(RETRY_EVERY_S)
            return []


def _is_stored(item: AdvanceItem) -> bool:
    """Whether an event is in Airflow's database; the request for the store is none."""
    return item.outcome.is_clean and (item.broker_payload is None or item.broker_payload.fired)


def _will_be_confirmed() -> bool:
    """Whether Airflow will tell when the trigger's last event is stored; asked when the trigger is resumed after it.

    Where trigger or triggerer end in that moment, Airflow loses the event and reports its item as stored nevertheless.
    There is no public access to this.
    """
    current = _reject_context.get()
    entry = current.group._outstanding.get(current.event_id) if current else None  # noqa: SLF001
    binding = entry.bindings.get(current.trigger_id) if current and entry else None
    return bool(binding and binding.unconfirmed_seqs)


class CheckpointCursor:
    """The id of a stream's last event, saved in the state of each asset of the trigger.

    Airflow merges equal triggers of several assets; an asset that is added later continues where the others are.
    """

    def __init__(self, store: AssetStateStoreAccessors | None, conn_id: str, stream: str) -> None:
        self._key = f"last_checkpoint/{conn_id}/{stream}"
        self._kept_at = list(store._by_name.values()) if store else []  # noqa: SLF001 (there is no public access to its assets)

    async def get(self) -> str:
        """Return the id, empty for none."""
        kept = [await asset.aget(self._key) for asset in self._kept_at]
        return max((each for each in kept if isinstance(each, str)), key=_entry_order, default="")

    async def set(self, last_id: str) -> None:
        for asset in self._kept_at:
            await asset.aset(self._key, last_id)


def _entry_order(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))
