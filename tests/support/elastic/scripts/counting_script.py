"""A training script whose model counts the steps of each sample."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from edl_runtime import elastic

SHARD = 20
"""Samples of a shard."""


class Counts(paddle.nn.Layer):  # type: ignore[misc]
    """One number a sample. The loss of a batch falls as those of its samples grow."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.counts = self.create_parameter([samples], default_initializer=paddle.nn.initializer.Constant(0.0))

    def forward(self, numbers: Any) -> Any:
        return -paddle.gather(self.counts, numbers).mean()


def read(shard: str) -> Iterator[tuple[np.int64]]:
    first = SHARD * int(shard)
    return ((np.int64(number),) for number in range(first, first + SHARD))


def batches(run: elastic.Run, samples: int, feed: str) -> Any:
    """Return those of one epoch, by a cursor or a ledger."""
    if feed == "cursor":
        return run.data([(np.int64(number),) for number in range(samples)], global_batch=24, seed=1)
    return run.shards(read, [str(number) for number in range(samples // SHARD)], batch_size=8, seed=1, shuffle=True)


def main(out: Path, samples: int, feed: str) -> None:
    """Train, slowly while there is a file `slowly`; log each step."""
    run = elastic.init()
    model = Counts(samples)
    # without memory Adam steps by 1 wherever there is a gradient, however large it is
    optimizer = paddle.optimizer.Adam(1.0, beta1=0.0, beta2=0.0, epsilon=1e-12, parameters=model.parameters())
    run.wrap(model, optimizer)
    with (out / f"stepped-{os.getpid()}.jsonl").open("a", buffering=1) as log:
        for (numbers,) in batches(run, samples, feed):
            loss = model(numbers)
            loss.backward()
            with contextlib.suppress(FileNotFoundError):
                (out / "slowly").stat()
                time.sleep(0.1)
            run.step(loss=loss)
            log.write(json.dumps({"step": run.step_number, "at": time.time()}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
