"""Trains a small residual network on grey pictures, in pods that come and go; train_pretrain.sh starts it in each."""

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

sys.path.append(str(Path(__file__).resolve().parent.parent / "vision_distill"))  # what it shares with these examples
sys.path.append(str(Path(__file__).resolve().parent.parent / "mnist_distill"))

from flags import LARGEST_SEED, above_zero, whole
from networks import Teacher, accuracy, to_input
from pictures import Pictures, load_pictures
from vision_flags import run as run_script

SHAPE = (1, 28, 28)
MOMENTUM = 0.9


class Labelled:
    """Pictures and labels by index. Every trainer has all of them, and reads its part."""

    def __init__(self, pictures: Pictures) -> None:
        self.images = pictures.images
        self.labels = pictures.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], np.int64]:
        return self.images[index], self.labels[index]


def main() -> None:
    """Train until all epochs are done, or this pod has to leave; then print the accuracy."""
    options = _options()
    pictures = load_pictures(options.data_dir, SHAPE, options.rows)
    paddle.seed(options.seed)

    run = elastic.init()
    network = Teacher()
    rate = paddle.optimizer.lr.CosineAnnealingDecay(options.lr, options.num_epochs)
    optimizer = paddle.optimizer.Momentum(rate, MOMENTUM, parameters=network.parameters())
    run.wrap(network, optimizer, schedule="epoch")
    batches = run.data(
        Labelled(pictures), global_batch=options.batch_size, epochs=options.num_epochs, seed=options.seed
    )
    trainers = 0
    for images, labels in batches:
        if run.world_size != trainers:
            trainers = run.world_size
            print(f"step {run.step_number}: {trainers} trainers", flush=True)
        loss = F.cross_entropy(network(to_input(images.numpy())), labels)
        loss.backward()
        time.sleep(options.pause_s)
        run.step(loss=loss)
    if run.rank == 0:
        reached = accuracy(network, pictures.test_images, pictures.test_labels)
        run.metrics(accuracy=reached)
        print(f"step {run.step_number}: accuracy {reached:.4f}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--data_dir", type=Path, default=Path("ImageNet"), help="IDX files, or class folders")
    parser.add_argument("--rows", type=whole(10), help="pictures for training; by default all")
    parser.add_argument("--num_epochs", type=whole(1), default=20)
    parser.add_argument("--batch_size", type=whole(1), default=64, help="pictures of a step, over all trainers")
    parser.add_argument("--lr", type=above_zero, default=0.05, help="at first; it falls along a cosine")
    parser.add_argument("--pause_s", type=float, default=0.0, help="seconds added to each step, to watch it")
    parser.add_argument("--seed", type=whole(0, LARGEST_SEED), default=0)
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
