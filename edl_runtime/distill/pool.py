"""The teachers in use: two connections to each, kept up while the teacher is wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from edl_runtime.distill.health import Health
from edl_runtime.distill.lane import Asking, LaneThread

LANES_A_TEACHER = 2
"""While one request is on the wire, the other is being answered."""


class TeacherPool:
    """Keeps lanes to the wanted teachers of one pool."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._lock = threading.RLock()  # reentrant: the garbage collector may stop it from inside
        self._in_use: dict[str, list[LaneThread]] = {}
        self._threads: list[LaneThread] = []  # those too that finish what they are asked
        self._closed = False

    def use(self, addresses: Collection[str]) -> None:
        """Use these teachers and no others; those that leave finish what they are asked. Doesn't wait."""
        with self._lock:
            if self._closed:
                return
            leaving = [lane for address in self._in_use.keys() - addresses for lane in self._in_use.pop(address)]
            coming = [self._add(address) for address in addresses if address not in self._in_use]
        self._dismiss(leaving)
        for lane in (lane for lanes in coming for lane in lanes):
            lane.start()
        if not addresses:
            self.lacks("no teacher is registered")

    def lacks(self, trouble: str) -> None:
        """There are none to use, because of `trouble`."""
        self._asking.dispatcher.lacks(trouble)

    def quarantined(self) -> dict[str, str]:
        """Return the teachers in use that are in quarantine, address → why."""
        with self._lock:
            healths = {address: lanes[0].health for address, lanes in self._in_use.items()}
        return {address: health.reason for address, health in healths.items() if health.reason}

    def stop(self) -> None:
        """Disconnect from all teachers, in the middle of what they are asked. Doesn't wait."""
        with self._lock:
            self._closed = True
            self._in_use.clear()
            threads = list(self._threads)
        self._dismiss(threads)
        for thread in threads:
            thread.disconnect()

    def join(self, until: float) -> None:
        """Wait for all threads to end, until the monotonic clock says `until`."""
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _add(self, address: str) -> list[LaneThread]:
        health = Health(address)
        lanes = [LaneThread(self._asking, health, number) for number in range(LANES_A_TEACHER)]
        self._in_use[address] = lanes
        self._threads = [*(thread for thread in self._threads if thread.is_alive() or not thread.gone.is_set()), *lanes]
        return lanes

    def _dismiss(self, threads: list[LaneThread]) -> None:
        for thread in threads:
            thread.leave()
        self._asking.dispatcher.dismiss([thread.lane for thread in threads])
