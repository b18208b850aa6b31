"""Makes asset events of jobs and pools that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import structlog
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.operators.templates import check_seconds
from edl_airflow.site import Site, open_site
from edl_airflow.triggers.base import looked_up_at_last
from edl_runtime.autoscale.news import News
from edl_runtime.errors import RegistryUnavailableError

RETRY_EVERY_S = 2.0
"""How long to wait before Redis is asked again that was away."""

MOST_NAMED = 100
"""So many jobs an event names at most."""

log = structlog.get_logger(__name__)


class EdlJobsTrigger(BaseEventTrigger):
    """Fires when jobs or pools of a connection have come or gone: once for all within `settle_s` seconds of the first.

    For an `AssetWatcher`; `edl_airflow.assets.jobs_asset` makes the asset. The event is `jobs`, the last news of each
    as {"job": …, "what": "submitted" or "ended", "at": Unix seconds}, the newest 100 at most. By its time the pods of
    a job that was submitted are there, and wait for room if there is none.

    Hears of all that Airflow's tasks, `edl submit` and `edl run` start, of what tasks and `edl run` see end, and of
    what tasks and `edl stop` stop, sometimes twice. As it starts it hears of the last minute once more. Rides out a
    Redis that is away, and misses what comes or goes then. Waits for a connection that is missing or wrong.

    :param edl_conn_id: the Airflow connection of type `edl`
    :param settle_s: seconds from the first news to the event
    """

    def __init__(self, edl_conn_id: str = DEFAULT_CONN_ID, settle_s: float = 5.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        check_seconds("settle_s", settle_s)
        self.edl_conn_id = edl_conn_id
        self.settle_s = settle_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        given = {"edl_conn_id": self.edl_conn_id, "settle_s": self.settle_s}
        return "edl_airflow.triggers.news.EdlJobsTrigger", given

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire for ever."""
        async with open_site(await looked_up_at_last(self.edl_conn_id)) as site:
            last_id = ""
            while True:
                last_id, news = await self._next(site, last_id)
                if news:
                    await asyncio.sleep(self.settle_s)
                    last_id, more = await self._next(site, last_id, block_ms=0)
                    yield TriggerEvent(payload([*news, *more]))  # type: ignore[no-untyped-call]

    async def _next(self, site: Site, last_id: str, *, block_ms: int = 1000) -> tuple[str, list[News]]:
        try:
            return await site.news_since(last_id, block_ms=block_ms)
        except RegistryUnavailableError as error:
            log.warning("news.unavailable", conn_id=self.edl_conn_id, cause=str(error))
            await asyncio.sleep(RETRY_EVERY_S)
            return last_id, []


def payload(news: list[News]) -> dict[str, Any]:
    """Return the last news of each job, the newest last, as an event has it."""
    last: dict[str, News] = {}
    for one in news:
        last.pop(one.job, None)
        last[one.job] = one
    return {"jobs": [msgspec.to_builtins(one) for one in [*last.values()][-MOST_NAMED:]]}
