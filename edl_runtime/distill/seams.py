"""Where the threads of a pipeline meet."""

from __future__ import annotations

import threading
from collections.abc import Callable

from edl_runtime.distill.batches import Request


class Seams:
    """What a dispatcher and its pipeline share: one lock, and whom to wake.

    - `room`: the feeder, when there is more room, or a model is known.
    - `done`: the training script, when what it waits for has come or can't come.
    - `ask_anew`: called with a request that failed; tells whether it was more than usual and is asked in parts.
    - `asked`: called when a teacher comes or is asked something, for whoever watches how long that takes.
    """

    def __init__(self, lock: threading.RLock, asked: Callable[[], None], ask_anew: Callable[[Request], bool]) -> None:
        self.lock = lock
        self.room = threading.Condition(lock)
        self.done = threading.Condition(lock)
        self.asked = asked
        self.ask_anew = ask_anew
