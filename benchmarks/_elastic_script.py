"""The common part of the training scripts of `resize.py`. PyTorch's environment has the standard library only."""

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
    """A training's options, its steps, and their log.

    - `layers`: number of linear layers of `WIDTH` by `WIDTH` that have the given size, with Adam's two moments.
    - `checkpoint`: a file for scripts that save their state themselves.
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
        """Take the time of a step: compute, or sleep as if a GPU computed."""
        if not self._busy:
            time.sleep(self._step_s)
            return
        until = time.monotonic() + self._step_s
        while time.monotonic() < until:
            compute()

    def log_step(self, *, generation: int, rank: int, world_size: int, step: int) -> None:
        """Log that this step has been applied."""
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
