"""CPU time of a function."""

from __future__ import annotations

import time
from collections.abc import Callable


def least_cpu_ms(work: Callable[[], object], rounds: int) -> float:
    """Return the least of `rounds` measurements of this process's CPU time, in ms: others share the machine."""
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken) * 1000
