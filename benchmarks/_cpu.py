"""How much of a processor something takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def least_cpu_ms(work: Callable[[], object], rounds: int) -> float:
    """Return the least of so many measurements, in milliseconds of this process: others share the machine."""
    taken = []
    for _ in range(rounds):
        begun = time.process_time()
        work()
        taken.append(time.process_time() - begun)
    return min(taken) * 1000
