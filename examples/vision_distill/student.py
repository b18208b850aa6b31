"""Trains a small student on pictures: alone, or with teachers' answers.

    python student.py --data_dir ../../.datasets/fashion                                  # alone
    python student.py --data_dir … --use_distill_service                                  # teachers of EDL_POOL
    python student.py --data_dir … --use_distill_service --distill_teachers=127.0.0.1:9000

Pictures are moved and mirrored at random, so every epoch asks teachers about new ones. With --labels, only so many
labels are known: alone, the student learns from those pictures, repeated; with teachers from all. Steps and batches are
the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812 -- as Paddle's own documents name it

from edl_runtime.distill import DistillReader, JobReporter, Normalise
from edl_runtime.distill.losses import UNLABELLED, distill_loss
from edl_runtime.result import write_result

sys.path.append(str(Path(__file__).resolve().parent.parent / "mnist_distill"))  # what it shares with that example

from batches import Batches
from digits import hide_labels
from flags import LARGEST_SEED, above_zero, fixed_teachers, share, whole, yes_or_no
from models import SmallStudent
from networks import accuracy, save_weights, to_input
from pictures import DataError, Pictures, augment, load_pictures
from vision_flags import add_data_flags, run

AS_BYTES = {"image": Normalise(mean=0.0, std=255.0)}
"""Pictures travel as bytes; teachers make 0 to 1 of them."""


class Training:
    """One student, its training, and its accuracy after each epoch."""

    def __init__(self, pictures: Pictures, options: argparse.Namespace, reporter: JobReporter) -> None:
        self.pictures = pictures
        self.options = options
        self.reporter = reporter
        self.accuracies: list[float] = []
        self.seconds = 0.0
        paddle.seed(options.seed)
        self.student = SmallStudent(options.image_shape[0], pictures.classes)
        steps = options.num_epochs * (len(pictures.labels) // options.batch_size)
        self.rate = paddle.optimizer.lr.CosineAnnealingDecay(options.lr, T_max=steps)
        self.optimizer = paddle.optimizer.Adam(self.rate, parameters=self.student.parameters())

    def train(self) -> Mapping[str, int]:
        """Train for all epochs; return the requests by teacher."""
        options, images, labels = self.options, self.pictures.images, self.pictures.labels
        if not options.use_distill_service:
            known = np.resize(np.flatnonzero(labels != UNLABELLED), len(labels))
            self._fit(Batches(images[known], labels[known], options.batch_size, augment, options.seed))
            return {}
        with DistillReader(
            Batches(images, labels, options.batch_size, augment, options.seed),
            inputs=["image", None],
            outputs=["logits"],
            normalise=AS_BYTES,
            teachers=options.distill_teachers,
            epochs=options.num_epochs,
            reporter=self.reporter,
        ) as reader:
            self._fit(reader)
            return reader.stats().answered

    def _fit(self, source: Iterable[Any]) -> None:
        """Train on batches of images and labels, with teachers' logits or without."""
        for epoch in range(1, self.options.num_epochs + 1):
            started = time.monotonic()
            for images, labels, *answers in source:
                loss = self._loss(images, labels, *answers)
                loss.backward()
                self.optimizer.step()
                self.optimizer.clear_grad()
                self.rate.step()
                if not answers:
                    self.reporter.advance(len(labels))
                self.reporter.report(loss=float(loss), epoch=epoch)
            self.seconds += time.monotonic() - started
            self.accuracies.append(accuracy(self.student, self.pictures.test_images, self.pictures.test_labels))
            print(f"epoch {epoch}/{self.options.num_epochs}: accuracy {self.accuracies[-1]:.2%}", flush=True)

    def _loss(self, images: Any, labels: Any, teacher_logits: Any = None) -> paddle.Tensor:
        logits = self.student(to_input(images))
        if teacher_logits is None:
            return F.cross_entropy(logits, paddle.to_tensor(labels))
        if teacher_logits.shape[1] != self.pictures.classes:
            raise DataError(
                self.options.data_dir, f"{self.pictures.classes} classes", f"the teachers' {teacher_logits.shape[1]}"
            )
        return distill_loss(
            logits,
            paddle.to_tensor(labels),
            paddle.to_tensor(teacher_logits),
            temperature=self.options.temperature,
            weight=self.options.weight,
        )


def main() -> None:
    """Train; write the checkpoint, the result, and the curve if that is wanted."""
    options = _options()
    pictures = load_pictures(options.data_dir, options.image_shape, options.rows)
    if options.batch_size > len(pictures.labels):
        raise DataError(
            options.data_dir, f"{len(pictures.labels):,} pictures", f"--batch_size {options.batch_size} or more"
        )
    if options.labels:
        labels = hide_labels(pictures.labels, options.labels, options.seed, pictures.classes)
        pictures = pictures._replace(labels=labels)
    steps = options.num_epochs * (len(pictures.labels) // options.batch_size)
    with JobReporter(total_steps=steps) as reporter:
        training = Training(pictures, options, reporter)
        answered = training.train()
    way = "distilled" if options.use_distill_service else "alone"
    metrics = {
        "accuracy": round(training.accuracies[-1], 4),
        "samples_per_s": round(steps * options.batch_size / training.seconds),
        "batch_size": options.batch_size,
        "answered": dict(answered),
    }
    if options.curves:
        curve = {"way": way, "labels": options.labels, "seed": options.seed, "accuracies": training.accuracies}
        options.curves.mkdir(parents=True, exist_ok=True)
        (options.curves / f"{way}-{options.labels or 'all'}-{options.seed}.json").write_text(json.dumps(curve))
    checkpoint = options.checkpoint.absolute()
    save_weights(training.student, checkpoint)
    write_result(checkpoint=str(checkpoint), metrics=metrics)
    print(f"{way}: accuracy {training.accuracies[-1]:.2%}; the student is in {checkpoint}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_flags(parser)
    parser.add_argument(
        "--use_distill_service", nargs="?", type=yes_or_no, const=True, default=False, help="train with teachers"
    )
    parser.add_argument(
        "--distill_teachers", type=fixed_teachers, help="host:port,…; by default EDL_TEACHERS or EDL_POOL"
    )
    parser.add_argument("--num_epochs", type=whole(1), default=6, help="passes over all pictures")
    parser.add_argument("--batch_size", type=whole(1), default=64)
    parser.add_argument("--lr", type=above_zero, default=5e-3, help="learning rate at first; it falls to 0 by a cosine")
    parser.add_argument("--labels", type=whole(1), help="known labels, the same number of each class; by default all")
    parser.add_argument("--temperature", type=above_zero, default=4.0, help="softens the teachers' answers")
    parser.add_argument("--weight", type=share, default=0.9, help="of the teachers' answers against labels, 0 to 1")
    parser.add_argument("--seed", type=whole(0, LARGEST_SEED), default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("student.safetensors"))
    parser.add_argument("--curves", type=Path, help="folder for the accuracy after each epoch, which curves.py draws")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
