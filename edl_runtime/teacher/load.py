"""How busy a teacher is, as it reports to its pool."""

from __future__ import annotations

import time
from collections.abc import Callable

from edl_runtime.meter import WINDOW_S, BusyTime, Meter
from edl_runtime.pool_reports import TeacherReport


class Load:
    """Measures in what share of its time each of a teacher's `devices` has something to do."""

    def __init__(self, devices: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._devices = devices
        self._clock_s = clock_s
        self._busy = BusyTime(clock_s())
        self._meter: Meter | None = None
        self._since = 0.0

    def begin(self, device: int) -> None:
        """A request came for this device: it runs, or waits for others that do."""
        self._busy.begin(device, self._clock_s())

    def end(self, device: int) -> None:
        """A request of this device is answered."""
        self._busy.end(device, self._clock_s())

    def report(self) -> TeacherReport:
        """Return how busy the teacher was of late; to be asked about once a second. The first time begins it."""
        now = self._clock_s()
        busy_s = self._busy.total_s(now) / self._devices
        if self._meter is None:
            self._meter, self._since = Meter(now, busy_s), now
        self._meter.mark(busy_s, now)
        return TeacherReport(busy=min(1.0, self._meter.rate(busy_s, now)), over_s=min(WINDOW_S, now - self._since))
