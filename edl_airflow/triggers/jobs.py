"""Turns changes of jobs and pools into asset events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import structlog
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from edl_airflow.client import open_client
from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.operators.templates import as_seconds
from edl_airflow.orphans import watching
from edl_airflow.triggers.base import LOOK_UP_AGAIN_S, load_connection_eventually
from edl_runtime.autoscale.cluster.changes import JobChange, JobsSeen, job_changes, jobs_seen
from edl_runtime.backends.interface import Backend

POLL_INTERVAL_S = 2.0
"""Seconds between two polls; for a cluster they read what watches have collected, without a request."""

MAX_JOBS_NAMED = 100
"""How many jobs one event names."""

log = structlog.get_logger(__name__)


class EdlJobsTrigger(BaseEventTrigger):
    """Fires when jobs or pools of a connection were submitted, have ended or have become pending.

    For an `AssetWatcher`; `edl_airflow.assets.jobs_asset` makes the asset. It polls the backend every two seconds, so
    it sees all of them, whoever started or stopped them. Changes within `settle_s` seconds are one event: `jobs`, each
    as {"job": …, "what": "submitted", "ended" or "pending"}, 100 at most. Changes that are undone by then, as of a pod
    that was placed again, are left out.

    A pending job has no room for its minimum. It fires again only after it had room in between, and not for suspended
    jobs or those in a Kueue queue.

    It fires for all jobs when it starts, so a restart of the triggerer misses nothing. Needs no Redis, tolerates a
    cluster outage, and waits for a connection that is missing or wrong.

    :param edl_conn_id: the Airflow connection of type `edl`
    :param settle_s: seconds from the first change to the event
    """

    def __init__(self, edl_conn_id: str = DEFAULT_CONN_ID, settle_s: float = 5.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        as_seconds("settle_s", settle_s)
        self.edl_conn_id = edl_conn_id
        self.settle_s = settle_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        given = {"edl_conn_id": self.edl_conn_id, "settle_s": self.settle_s}
        return "edl_airflow.triggers.jobs.EdlJobsTrigger", given

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire for ever; it never raises, as Airflow would restart it at once, without end."""
        known: JobsSeen = {}
        logged = ""
        while True:
            try:
                edl_connection = await load_connection_eventually(self.edl_conn_id)
                async with open_client(edl_connection) as client, watching(edl_connection):
                    while True:
                        known, found = await self._look(client.backend, known)
                        logged = ""
                        if found:
                            yield TriggerEvent(event_payload(found))  # type: ignore[no-untyped-call]
                        await asyncio.sleep(POLL_INTERVAL_S)
            except Exception as error:  # noqa: BLE001 (the connection may be edited, the cluster may come back)
                cause = f"{type(error).__name__}: {error}"
                if cause != logged:
                    log.warning("jobs.unavailable", conn_id=self.edl_conn_id, cause=cause, again_s=LOOK_UP_AGAIN_S)
                logged = cause
            await asyncio.sleep(LOOK_UP_AGAIN_S)

    async def _look(self, backend: Backend, known: JobsSeen) -> tuple[JobsSeen, list[JobChange]]:
        """Return the jobs, and the changes that last for `settle_s`."""
        now = jobs_seen(await backend.list())
        if job_changes(known, now):
            await asyncio.sleep(self.settle_s)
            now = jobs_seen(await backend.list())
        return now, job_changes(known, now)


def event_payload(found: list[JobChange]) -> dict[str, Any]:
    """Return an event's payload."""
    return {"jobs": [msgspec.to_builtins(one) for one in found[:MAX_JOBS_NAMED]]}
