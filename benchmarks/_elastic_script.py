"""What the training scripts of `resize.py` have in common. Only what comes with Python: PyTorch's has nothing else."""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

WIDTH = 512
BATCH = 12
"""Samples of a step, of all ranks together."""


class Script:
    """A training's options, what its steps are, and what it writes down of them.

    - `layers`: so many linear layers of `WIDTH` by `WIDTH` have, with Adam's two moments, the size that was asked for.
    - `checkpoint`: a file for a script that has to keep its state itself.
    """

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("folder", type=Path)
        parser.add_argument("--megabytes", type=float, required=True)
        parser.add_argument("--step-ms", type=float, required=True)
        parser.add_argument("--busy", action="store_true")
        options = parser.parse_args()
        self.layers = max(1, round(options.megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
        self.checkpoint = options.folder / "state"
        self._step_s = options.step_ms / 1000
        self._busy = options.busy
        self._instance = int(os.environ.get("BENCHMARK_INSTANCE") or os.environ["EDL_INSTANCE"])
        self._host = socket.gethostname()
        self._log = (options.folder / f"steps-{self._host}-{os.getpid()}.jsonl").open("a", buffering=1)

    def work(self, compute: Callable[[], object]) -> None:
        """Take as long as a step does: by computing over and over, or asleep as if a GPU computed."""
        if not self._busy:
            time.sleep(self._step_s)
            return
        until = time.monotonic() + self._step_s
        while time.monotonic() < until:
            compute()

    def tell(self, *, generation: int, rank: int, world_size: int, step: int) -> None:
        """Write down that this step has been applied, now."""
        line = {
            "at": time.time(),
            "instance": self._instance,
            "host": self._host,
            "pid": os.getpid(),
            "generation": generation,
            "rank": rank,
            "world_size": world_size,
            "step": step,
        }
        self._log.write(json.dumps(line) + "\n")
