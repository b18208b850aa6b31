"""When the next checkpoint is due."""

from __future__ import annotations

from edl_runtime.specs import Checkpoint


class Schedule:
    """Tells at each step whether a checkpoint is due, counted from `step` at the time `now`.

    By steps one is due at each multiple of `every_steps`, by time when `every_s` have passed. Pure: `now` is a reading
    of any clock that only goes forward, in seconds.
    """

    def __init__(self, spec: Checkpoint, *, step: int, now: float) -> None:
        self._every_steps = spec.every_steps
        self._every_s = spec.every_s
        self._step = step
        self._at = now

    def due(self, step: int, now: float) -> bool:
        """Whether one is due after `step`. If so, the next is counted from here, however this one fares."""
        by_steps = self._every_steps is not None and step // self._every_steps > self._step // self._every_steps
        by_time = self._every_s is not None and now - self._at >= self._every_s
        if by_steps or by_time:
            self.begin(step, now)
        return by_steps or by_time

    def age_s(self, now: float) -> float:
        """Return how long ago the last one was due."""
        return now - self._at

    def begin(self, step: int, now: float) -> None:
        """Count from here: a checkpoint was loaded, or written out of turn."""
        self._step, self._at = step, now
