"""The triggers that wait for a condition."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeAlias

import msgspec

from edl_airflow.client import open_client
from edl_airflow.hooks.edl import EdlConnection
from edl_airflow.runtime.spec import TaskOutcome
from edl_airflow.triggers.base import EdlTrigger
from edl_airflow.waits.checkpoint import CheckpointCondition
from edl_airflow.waits.conditions import JobCondition, PoolCondition, evaluate, wait_for
from edl_airflow.waits.traffic import TrafficCondition

clock = time.time
"""Unix seconds, by this machine's clock, which may be set at any time."""

AnyCondition: TypeAlias = PoolCondition | JobCondition | CheckpointCondition | TrafficCondition


class EdlConditionTrigger(EdlTrigger):
    """Fires one event when a wait has ended: its `TaskOutcome`, and the `condition`.

    For a traffic window it sleeps until the current window ends, checks the clock each minute, and needs no connection.

    :param condition: a `Condition`, as plain data
    """

    def __init__(self, condition: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.condition: AnyCondition = msgspec.convert(condition, AnyCondition)
        self.conn_id = self.condition.conn_id
        self.about = self.condition.about

    def serialize(self) -> tuple[str, dict[str, Any]]:
        condition = msgspec.to_builtins(self.condition, order="deterministic")
        return "edl_airflow.triggers.conditions.EdlConditionTrigger", {"condition": condition}

    async def outcome(self) -> TaskOutcome:
        if not isinstance(self.condition, TrafficCondition):
            return await super().outcome()
        while True:
            now = clock()
            view = self.condition.view(now)
            if outcome := evaluate(self.condition, view, now):
                return outcome
            await asyncio.sleep(self.condition.pause_s(view, now))

    async def follow(self, edl_connection: EdlConnection) -> TaskOutcome:
        """Wait for it."""
        async with open_client(edl_connection) as client:
            return await wait_for(self.condition, client, self.log.info)
