"""Follows a task's work in the triggerer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from airflow.triggers.base import BaseTrigger, TriggerEvent

from edl_airflow import conductor
from edl_airflow.failures import is_users_mistake
from edl_airflow.hooks.edl import EdlHook, open_site
from edl_airflow.work import Outcome, Work

FIRST_EVENT_AFTER_S = 5.0
"""Seconds before a first event: the scheduler may still be busy with the half of the task that has deferred."""


class EdlJobTrigger(BaseTrigger):
    """Goes on with a `Work` that an operator has begun, and fires one event: its `Outcome`, and the `work` again.

    (What a task keeps for itself when it defers is lost in `dag.test()`, so the event carries what is needed next.)

    Every failure is an event, so that the operator can stop what was started. When a person ends the task, `on_kill`
    stops it, unless a later try has taken it over. A triggerer that restarts goes on where the last one was.

    :param work: the `Work`, as plain data without secrets
    """

    def __init__(self, work: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = msgspec.convert(work, Work)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "edl_airflow.triggers.job.EdlJobTrigger", {"work": msgspec.to_builtins(self.work)}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Follow the work; by the time of the event, all sockets are closed."""
        quiet = asyncio.create_task(asyncio.sleep(FIRST_EVENT_AFTER_S))
        try:
            outcome = await self._conduct()
            await quiet
        finally:
            quiet.cancel()
        yield TriggerEvent({**msgspec.to_builtins(outcome), "work": msgspec.to_builtins(self.work)})  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """Stop everything that carries this try's token."""
        async with open_site(await EdlHook(self.work.conn_id).asurroundings()) as site:
            await conductor.stop(self.work, site)

    async def _conduct(self) -> Outcome:
        try:
            async with open_site(await EdlHook(self.work.conn_id).asurroundings()) as site:
                return await conductor.conduct(self.work, site, self.log.info)
        except Exception as error:  # a trigger that raises leaves no chance to stop what was started
            self.log.exception("The work can't be followed any more")
            return Outcome(
                ended="failed",
                name=conductor.name_of(self.work),
                reason=f"{type(error).__name__}: {error}",
                permanent=is_users_mistake(error),
            )
