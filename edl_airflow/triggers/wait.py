"""Waits in the triggerer."""

from __future__ import annotations

from typing import Any

import msgspec

from edl_airflow.checkpoint_wait import CheckpointWait
from edl_airflow.hooks.edl import Surroundings
from edl_airflow.job_wait import JobWait
from edl_airflow.pool_wait import PoolWait
from edl_airflow.site import open_site
from edl_airflow.triggers.base import EdlTrigger
from edl_airflow.waiting import wait_for
from edl_airflow.work import Outcome


class EdlWaitTrigger(EdlTrigger):
    """Fires one event when a wait has ended: its `Outcome`, and the `wait` again.

    :param wait: a `PoolWait`, `JobWait` or `CheckpointWait`, as plain data
    """

    def __init__(self, wait: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wait: PoolWait | JobWait | CheckpointWait = msgspec.convert(wait, PoolWait | JobWait | CheckpointWait)
        self.conn_id = self.wait.conn_id
        self.about = self.wait.about

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "edl_airflow.triggers.wait.EdlWaitTrigger", {"wait": msgspec.to_builtins(self.wait)}

    async def follow(self, surroundings: Surroundings) -> Outcome:
        """Wait for it."""
        async with open_site(surroundings) as site:
            return await wait_for(self.wait, site, self.log.info)
