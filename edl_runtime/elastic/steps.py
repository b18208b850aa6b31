"""How far and how fast an instance's trainers go, from what they say of their steps. Pure."""

from __future__ import annotations

import statistics
from collections import deque

from edl_runtime.elastic.messages import Stepped
from edl_runtime.progress import Progress

RATE_OVER_S = 10.0
"""Samples a second are those of the last ten."""


class Steps:
    """The steps of an instance's trainers, one after the other.

    - `step`, `generation`: of the last that was finished, 0 before the first.
    - `pause_s`: between the last step before that generation and the first in it, None without one before; that was in
      generation `paused_in`.
    """

    def __init__(self) -> None:
        self.step = 0
        self.generation = 0
        self.pause_s: float | None = None
        self.paused_in = 0
        self._last: Stepped | None = None
        self._took_s: deque[float] = deque(maxlen=20)
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, done: Stepped) -> None:
        """Note that a step is done."""
        last = self._last
        if last and done.generation > last.generation:
            self.pause_s, self.paused_in = done.clock_s - last.clock_s, last.generation
        elif last and done.step > last.step:
            self._took_s.append((done.clock_s - last.clock_s) / (done.step - last.step))
        if last and done.samples < last.samples:  # back to a checkpoint
            self._samples.clear()
        self._samples.append((done.clock_s, done.samples))
        while self._samples[0][0] < done.clock_s - RATE_OVER_S:
            self._samples.popleft()
        self.step, self.generation, self._last = done.step, done.generation, done

    @property
    def median_s(self) -> float:
        """What a step takes, 0 while that is not known."""
        return statistics.median(self._took_s) if self._took_s else 0.0

    def progress(self, *, instances: int, generation: int, note: str = "") -> Progress | None:
        """Return the report of the whole job, None before the first step."""
        last = self._last
        if last is None:
            return None
        (begin, before), (end, after) = self._samples[0], self._samples[-1]
        left = last.total_steps - last.step if last.total_steps is not None else None
        return Progress(
            step=last.step,
            updated_at=last.at,
            total_steps=last.total_steps,
            epoch=last.epoch,
            loss=last.loss,
            samples_per_s=(after - before) / (end - begin) if end > begin else 0.0,
            time_left_s=left * self.median_s if left is not None and self._took_s else None,
            instances=instances,
            generation=generation,
            note=note,
        )
