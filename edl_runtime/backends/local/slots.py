"""The places of a job's instances."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import msgspec

from edl_runtime.backends.base import InstanceStatus
from edl_runtime.backends.local.capacity import HERE

_HOUR_S = 3600.0


class Trouble(msgspec.Struct, frozen=True):
    """Why an instance does not come up, and the end of its log."""

    reason: str
    last_lines: tuple[str, ...] = ()


class Slot:
    """The place of one instance: who is in it now, how that fares, and whether it has to go.

    `finished`: nobody comes into it any more. `short_lives`: how many in a row it has had; see `restarts`.
    """

    def __init__(self, index: int) -> None:
        self.leave = asyncio.Event()
        self.finished = False
        self.short_lives = 0
        self.trouble: Trouble | None = None
        self.status = InstanceStatus(index=index, phase="running", started_at=time.time(), node=HERE)
        self._ended_at: deque[float] = deque()

    def update(self, **changes: object) -> None:
        self.status = msgspec.structs.replace(self.status, **changes)

    def send_away(self) -> None:
        """Have its instance leave."""
        self.leave.set()
        self.update(leaving=True)

    def count_end(self, now: float) -> int:
        """Note that its instance has ended, and return how often that was so within the last hour of a clock."""
        self._ended_at.append(now)
        while self._ended_at[0] <= now - _HOUR_S:
            self._ended_at.popleft()
        return len(self._ended_at)

    def promising(self, most_short_lives: int) -> bool:
        """Whether a pool can go on with this one: it runs, or has not had too many short lives yet."""
        running = self.status.phase == "running"
        return not self.status.given_up and (running or self.short_lives < most_short_lives)
