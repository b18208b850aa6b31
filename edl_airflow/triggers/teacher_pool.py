"""Waits for a pool in the triggerer."""

from __future__ import annotations

from typing import Any

import msgspec

from edl_airflow.hooks.edl import Surroundings
from edl_airflow.pool_wait import PoolWait, wait_for_pool
from edl_airflow.site import open_site
from edl_airflow.triggers.base import EdlTrigger
from edl_airflow.work import Outcome


class EdlTeacherPoolTrigger(EdlTrigger):
    """Fires one event when the wait for a pool has ended: its `Outcome`, and the `wait` again.

    :param wait: the `PoolWait`, as plain data
    """

    def __init__(self, wait: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wait = msgspec.convert(wait, PoolWait)
        self.conn_id = self.wait.conn_id
        self.about = self.wait.pool

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "edl_airflow.triggers.teacher_pool.EdlTeacherPoolTrigger", {"wait": msgspec.to_builtins(self.wait)}

    async def follow(self, surroundings: Surroundings) -> Outcome:
        """Wait for the pool."""
        async with open_site(surroundings) as site:
            return await wait_for_pool(self.wait, site, self.log.info)
