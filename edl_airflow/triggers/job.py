"""Follows a task's work in the triggerer."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from edl_airflow import conductor
from edl_airflow.hooks.edl import Surroundings
from edl_airflow.site import backend_at, open_site
from edl_airflow.triggers.base import EdlTrigger
from edl_airflow.work import Outcome, Work
from edl_runtime.errors import ClusterUnavailableError

STOP_AGAIN_S = 30.0
"""Seconds between two tries to stop jobs in a cluster that is away, each of which takes minutes."""

_stopping: set[asyncio.Task[None]] = set()
"""What is being stopped; an event loop alone does not keep its tasks."""


class EdlJobTrigger(EdlTrigger):
    """Goes on with a `Work` that an operator has begun, and fires one event: its `Outcome`, and the `work` again.

    When a person ends the task, `on_kill` stops the work, unless a later try has taken it over; for that it needs no
    connection. A triggerer that restarts goes on where the last one was.

    :param work: the `Work`, as plain data without secrets
    """

    def __init__(self, work: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = msgspec.convert(work, Work)
        self.conn_id = self.work.conn_id
        self.about = self.work.name

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "edl_airflow.triggers.job.EdlJobTrigger", {"work": msgspec.to_builtins(self.work)}

    async def follow(self, surroundings: Surroundings) -> Outcome:
        """Do the rest of the work, where it was begun."""
        async with open_site(msgspec.structs.replace(surroundings, place=self.work.place)) as site:
            return await conductor.conduct(self.work, site, self.log.info)

    async def on_kill(self) -> None:
        """Stop everything that carries this try's token.

        Airflow waits for that for half a minute. Whoever waits longer, as for a cluster that is away, goes on alone
        while this triggerer runs. What fails otherwise is logged: by then, nobody may be there to raise it to.
        """
        stopping = asyncio.create_task(self._stop())
        _stopping.add(stopping)
        stopping.add_done_callback(_stopping.discard)
        await asyncio.shield(stopping)

    async def _stop(self) -> None:
        jobs, told = ", ".join(map(repr, self.work.jobs)), False
        try:
            backend = await asyncio.to_thread(backend_at, self.work.place)
            while True:
                try:
                    return await conductor.stop(self.work, backend)
                except ClusterUnavailableError as error:
                    if not told:
                        self.log.warning(
                            "Not stopped yet, and tried again until the cluster answers: %s: %s", jobs, error
                        )
                        told = True
                    await asyncio.sleep(STOP_AGAIN_S)
        except Exception:
            self.log.exception("Perhaps not stopped: %s. `edl jobs` shows what is left, `edl stop NAME` ends it", jobs)
