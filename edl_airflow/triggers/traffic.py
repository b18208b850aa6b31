"""Waits for a traffic window in the triggerer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from edl_airflow.traffic_wait import TrafficWait
from edl_airflow.triggers.base import EdlTrigger
from edl_airflow.waiting import judge
from edl_airflow.work import Outcome

clock = time.time
"""Unix seconds, by this machine's clock, which may be set back or forth at any time."""


class EdlTrafficTrigger(EdlTrigger):
    """Fires one event when a wait for a traffic window has ended: its `Outcome`, and the `wait` again.

    It sleeps until the window that holds is over, looking at the clock each minute, and asks nobody anything.

    :param wait: a `TrafficWait`, as plain data
    """

    def __init__(self, wait: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wait = msgspec.convert(wait, TrafficWait)
        self.about = self.wait.about

    def serialize(self) -> tuple[str, dict[str, Any]]:
        wait = msgspec.to_builtins(self.wait, order="deterministic")
        return "edl_airflow.triggers.traffic.EdlTrafficTrigger", {"wait": wait}

    async def outcome(self) -> Outcome:
        while True:
            now = clock()
            view = self.wait.view(now)
            if outcome := judge(self.wait, view, now):
                return outcome
            await asyncio.sleep(self.wait.pause_s(view, now))
