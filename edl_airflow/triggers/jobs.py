"""Makes asset events of jobs and pools that come, go or lack room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import structlog
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from edl_airflow.client import open_client
from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.operators.templates import check_seconds
from edl_airflow.triggers.base import LOOK_UP_AGAIN_S, load_connection_eventually
from edl_runtime.autoscale.cluster.changes import JobChange, JobsSeen, job_changes, jobs_seen
from edl_runtime.backends.interface import Backend

POLL_INTERVAL_S = 2.0
"""Seconds between two looks at the jobs; of those in a cluster watches tell, and a look asks nothing."""

MAX_JOBS_NAMED = 100
"""So many jobs an event names at most."""

log = structlog.get_logger(__name__)


class EdlJobsTrigger(BaseEventTrigger):
    """Fires when jobs or pools of a connection were submitted, have ended or have become pending.

    For an `AssetWatcher`; `edl_airflow.assets.jobs_asset` makes the asset. It looks at the backend every two seconds,
    so it sees them all, whoever has started or stopped them. What it sees `settle_s` seconds after the first is one
    event: `jobs`, each as {"job": …, "what": "submitted", "ended" or "pending"}, 100 at most. What is over by then, as
    of a pod that has found another place, is none.

    A pending job lacks room for its minimum. It fires again only when it has had it in between, and neither for one
    that is suspended nor for one that waits in a queue of Kueue's.

    As it starts it fires for all that are there, so a triggerer that restarts misses nothing. Needs no Redis, rides out
    a cluster that is away, and waits for a connection that is missing or wrong.

    :param edl_conn_id: the Airflow connection of type `edl`
    :param settle_s: seconds from the first look that finds something to the event
    """

    def __init__(self, edl_conn_id: str = DEFAULT_CONN_ID, settle_s: float = 5.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        check_seconds("settle_s", settle_s)
        self.edl_conn_id = edl_conn_id
        self.settle_s = settle_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        given = {"edl_conn_id": self.edl_conn_id, "settle_s": self.settle_s}
        return "edl_airflow.triggers.jobs.EdlJobsTrigger", given

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire for ever: Airflow would start a watcher that raises again at once, without end."""
        known: JobsSeen = {}
        said = ""
        while True:
            try:
                async with open_client(await load_connection_eventually(self.edl_conn_id)) as client:
                    while True:
                        known, found = await self._look(client.backend, known)
                        said = ""
                        if found:
                            yield TriggerEvent(event_payload(found))  # type: ignore[no-untyped-call]
                        await asyncio.sleep(POLL_INTERVAL_S)
            except Exception as error:  # noqa: BLE001 (whatever it is, the connection may be edited, the cluster be back)
                wrong = f"{type(error).__name__}: {error}"
                if wrong != said:
                    log.warning("jobs.unseen", conn_id=self.edl_conn_id, cause=wrong, again_s=LOOK_UP_AGAIN_S)
                said = wrong
            await asyncio.sleep(LOOK_UP_AGAIN_S)

    async def _look(self, backend: Backend, known: JobsSeen) -> tuple[JobsSeen, list[JobChange]]:
        """Return what there is, and what of it is new and stays so."""
        now = jobs_seen(await backend.list())
        if job_changes(known, now):
            await asyncio.sleep(self.settle_s)
            now = jobs_seen(await backend.list())
        return now, job_changes(known, now)


def event_payload(found: list[JobChange]) -> dict[str, Any]:
    """Return news as an event has them."""
    return {"jobs": [msgspec.to_builtins(one) for one in found[:MAX_JOBS_NAMED]]}
