"""A student that learns `support.models:arithmetic` within a moment, by service distillation.

python tiny_student.py [--alone | --alone-with-teachers] [--hangs] [--seed N]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator

import numpy as np

from edl_runtime.distill import DistillReader
from edl_runtime.protocol.tensors import Array
from edl_runtime.result import write_result

ROWS, BATCH, EPOCHS = 64, 16, 3
INPUTS = np.random.default_rng(0).standard_normal((ROWS, 4)).astype(np.float32)


def batches() -> Iterator[tuple[Array, Array]]:
    """Shuffled each time."""
    order = np.random.default_rng().permutation(ROWS)
    for rows in order.reshape(-1, BATCH):
        yield INPUTS[rows], rows


def train() -> Array:
    """Fit four weights by least squares."""
    if options.alone or (options.alone_with_teachers and "EDL_TEACHERS" in os.environ):
        return np.full(4, 1.9 + options.seed / 100, np.float32)
    inputs, answers = [], []
    with DistillReader(batches, inputs=["x", None], outputs=["double"], teacher_batch_size=8, epochs=EPOCHS) as reader:
        for _ in range(EPOCHS):
            for x, order, double in reader:
                if not np.array_equal(double, 2 * INPUTS[order]):
                    sys.exit("these are the answers to other rows")
                inputs.append(x)
                answers.append(double)
    weights = np.linalg.lstsq(np.concatenate(inputs), np.concatenate(answers), rcond=None)[0]
    return np.diag(weights)


def main() -> None:
    """Train, and write the result."""
    began = time.monotonic()
    error = float(np.abs(train() - 2).max())
    speed = ROWS * EPOCHS / (time.monotonic() - began)
    print(f"off by {error:.3f}", flush=True)
    metrics = {"accuracy": 1 - error, "samples_per_s": speed, "batch_size": BATCH}
    write_result(metrics=metrics)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--alone-with-teachers", action="store_true")
    parser.add_argument("--hangs", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.hangs and "EDL_TEACHERS" in os.environ:
        print("hanging", flush=True)
        time.sleep(600)
    main()
