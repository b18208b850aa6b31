"""Makes asset events of checkpoints that land."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.operators.templates import check_stream
from edl_airflow.site import Site, open_site
from edl_airflow.triggers.base import looked_up
from edl_airflow.work import LandedCheckpoint
from edl_runtime.errors import RegistryUnavailableError

RETRY_EVERY_S = 2.0
"""How long to wait before Redis is asked again that was away."""

CURSOR = "last_checkpoint"
"""Where the asset's state keeps up to which id events were made."""


class EdlCheckpointTrigger(BaseEventTrigger):
    """Fires for each checkpoint that lands in a stream: a `LandedCheckpoint` and the `stream`.

    For an `AssetWatcher`: `Asset("digits", watchers=[AssetWatcher(name="landed", trigger=EdlCheckpointTrigger(...))])`
    makes each checkpoint an event of the asset, whose `extra["payload"]` says step, URL and metrics. The first time it
    starts with what lands from then on; later with what has landed since its last event, which may come a second time
    when a triggerer was lost. Rides out a Redis that is away.

    Each watched stream costs one connection to Redis, which waits there. (Airflow's shared streams would save none:
    what all members of one share can't be told how far each has come, and equal triggers are one anyway.)

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

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire for ever."""
        async with open_site(await looked_up(self.edl_conn_id)) as site:
            last_id = await self._kept() or await self._end(site)
            while True:
                for last_id, checkpoint in await self._landed(site, last_id):  # noqa: B020 (where the next round starts)
                    if checkpoint:
                        yield TriggerEvent({"stream": self.stream, **checkpoint})  # type: ignore[no-untyped-call]
                    await self._keep(last_id)

    async def _kept(self) -> str:
        kept = await self.asset_state_store.aget(CURSOR) if self.asset_state_store else None
        return kept if isinstance(kept, str) else ""

    async def _keep(self, last_id: str) -> None:
        if self.asset_state_store:
            await self.asset_state_store.aset(CURSOR, last_id)

    async def _end(self, site: Site) -> str:
        while True:
            try:
                last_id = await site.end_of_checkpoints(self.stream)
            except RegistryUnavailableError:
                await asyncio.sleep(RETRY_EVERY_S)
            else:
                await self._keep(last_id)
                return last_id

    async def _landed(self, site: Site, last_id: str) -> list[tuple[str, LandedCheckpoint | None]]:
        try:
            return await site.next_checkpoints(self.stream, last_id)
        except RegistryUnavailableError as error:
            self.log.warning("%s. Asking again", error)
            await asyncio.sleep(RETRY_EVERY_S)
            return []
