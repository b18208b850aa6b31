"""Follows a task's work in the triggerer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from airflow.triggers.base import TriggerEvent

from edl_airflow import conductor
from edl_airflow.hooks.edl import Surroundings
from edl_airflow.site import backend_at, open_site
from edl_airflow.triggers.base import EdlTrigger
from edl_airflow.work import Outcome, Work
from edl_runtime.errors import ClusterUnavailableError

ENDED_BY_A_PERSON = "__airflow_user_action__"
"""With what Airflow cancels a trigger whose task a person has cleared or marked."""

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
        self._stopping: asyncio.Task[None] | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "edl_airflow.triggers.job.EdlJobTrigger", {"work": msgspec.to_builtins(self.work)}

    async def follow(self, surroundings: Surroundings) -> Outcome:
        """Do the rest of the work, where it was begun."""
        async with open_site(msgspec.structs.replace(surroundings, place=self.work.place)) as site:
            return await conductor.conduct(self.work, site, self.log.info)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """As its parent's. When a person ends the task, what it has begun is being stopped before this ends.

        Airflow cancels a trigger again each second until it has ended, and calls `on_kill` only if none of that hits it
        between the first time and the call, as happens on a busy machine.
        """
        try:
            async with aclosing(super().run()) as events:  # type: ignore[type-var]  # its parent's is a generator, too
                async for event in events:
                    yield event
        except asyncio.CancelledError as cancelled:
            if ENDED_BY_A_PERSON in cancelled.args:
                self._begin_to_stop()
            raise

    async def on_kill(self) -> None:
        """Stop everything that carries this try's token.

        Airflow waits for that for half a minute. Whoever waits longer, as for a cluster that is away, goes on alone
        while this triggerer runs. What fails otherwise is logged: by then, nobody may be there to raise it to.
        """
        await asyncio.shield(self._begin_to_stop())

    def _begin_to_stop(self) -> asyncio.Task[None]:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
            _stopping.add(self._stopping)
            self._stopping.add_done_callback(_stopping.discard)
        return self._stopping

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
