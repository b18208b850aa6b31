"""Trains a network on handwritten digits, by instances that may join and leave meanwhile.

    python train.py                                           # one instance
    edl run --instances 1:4 --checkpoint checkpoints -- python train.py
    edl resize train 3                                        # from another shell

After a restart, it continues from the newest checkpoint. dags/edl_nightly_elastic_training.py does the same in Airflow.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F  # noqa: N812 -- as Paddle's own documents name it

from edl_runtime import elastic

sys.path.append(str(Path(__file__).resolve().parent.parent / "mnist_distill"))  # its digits and its networks

LEARNING_RATE = 1e-3
MEASURED_EVERY = 50
"""Steps between two measurements of the accuracy on the held-out digits."""


class Digits:
    """Images and labels by index. Every instance has all of them, and reads its part."""

    def __init__(self, images: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.float32], np.int64]:
        return self.images[index], self.labels[index]


def main() -> None:
    """Train until all epochs are done, or this instance has to leave."""
    from digits import load_digits
    from networks import Convolutions, accuracy

    options = _options()
    digits = load_digits(options.data_dir)
    held_out = digits.test_images, digits.test_labels
    paddle.seed(options.seed)

    run = elastic.init()
    network = Convolutions()
    optimizer = paddle.optimizer.Adam(LEARNING_RATE, parameters=network.parameters())
    network, optimizer = run.wrap(network, optimizer)
    print(f"continues from step {run.step_number} as one of {run.world_size}", flush=True)
    batches = run.data(
        Digits(digits.images, digits.labels),
        global_batch=options.batch_size,
        epochs=options.epochs,
        seed=options.seed,
    )
    for images, labels in batches:
        loss = F.cross_entropy(network(images), labels)
        loss.backward()
        time.sleep(options.pause_s)
        run.step(loss=loss)
        if run.rank == 0 and run.step_number % MEASURED_EVERY == 0:
            reached = accuracy(network, *held_out)
            run.metrics(accuracy=reached)
            print(f"step {run.step_number}: loss {run.mean_loss:.3f}, accuracy {reached:.1%}", flush=True)


def _options() -> argparse.Namespace:
    from flags import LARGEST_SEED, whole

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="caches the digits")
    parser.add_argument("--epochs", type=whole(1), default=10)
    parser.add_argument("--batch-size", type=whole(1), default=64, help="images per step, over all instances")
    parser.add_argument("--pause-s", type=float, default=0.0, help="seconds added to each step, to watch it")
    parser.add_argument("--seed", type=whole(0, LARGEST_SEED), default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
