"""Waits for a pool in the triggerer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from airflow.triggers.base import BaseTrigger, TriggerEvent

from edl_airflow.failures import is_users_mistake
from edl_airflow.hooks.edl import EdlHook, open_site
from edl_airflow.pool_wait import PoolWait, wait_for_pool
from edl_airflow.triggers.job import FIRST_EVENT_AFTER_S
from edl_airflow.work import Outcome


class EdlTeacherPoolTrigger(BaseTrigger):
    """Fires one event when a pool has the members asked for, has failed, or the time is up: `Outcome` and `wait`.

    :param wait: the `PoolWait`, as plain data
    """

    def __init__(self, wait: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wait = msgspec.convert(wait, PoolWait)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "edl_airflow.triggers.teacher_pool.EdlTeacherPoolTrigger", {"wait": msgspec.to_builtins(self.wait)}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait; by the time of the event, all sockets are closed."""
        await asyncio.sleep(FIRST_EVENT_AFTER_S)
        outcome = await self._outcome()
        yield TriggerEvent({**msgspec.to_builtins(outcome), "wait": msgspec.to_builtins(self.wait)})  # type: ignore[no-untyped-call]

    async def _outcome(self) -> Outcome:
        try:
            async with open_site(await EdlHook(self.wait.conn_id).asurroundings()) as site:
                return await wait_for_pool(self.wait, site, self.log.info)
        except Exception as error:
            self.log.exception("The pool can't be watched any more")
            reason = f"{type(error).__name__}: {error}"
            return Outcome(ended="failed", name=self.wait.pool, reason=reason, permanent=is_users_mistake(error))
