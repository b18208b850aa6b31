"""Trains a small student with few labels: alone, and with the answers of teachers to all images.

    python student.py --use_distill_service                                          # teachers of EDL_POOL
    python student.py --use_distill_service --distill_teachers=127.0.0.1:9000,127.0.0.1:9001
    python student.py                                                                # alone only
    edl compare --model teacher --pure --use_distill_service=no -- python student.py --use_distill_service

Both train for the same number of steps on batches of the same size, for several seeds. The difference: alone, the
student learns only from labelled images; with the teachers' answers it learns from all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812 -- as Paddle's own documents name it
from batches import Batches
from digits import MOST_LABELS, TRAINED_ON, Digits, hide_labels, load_digits, shift
from flags import LARGEST_SEED, above_zero, fixed_teachers, share, whole, yes_or_no
from networks import STUDENTS, accuracy, save_weights

from edl_runtime.distill import DistillReader, JobReporter, ReaderStats
from edl_runtime.distill.losses import UNLABELLED, distill_loss
from edl_runtime.result import write_result

LEARNING_RATE = 5e-3


class Trained(NamedTuple):
    """A student, its accuracy and its training speed."""

    student: paddle.nn.Layer
    accuracy: float
    samples_per_s: float
    stats: ReaderStats = ReaderStats()


def train_distilled(digits: Digits, options: argparse.Namespace, seed: int, reporter: JobReporter) -> Trained:
    """Train on all images, with the teachers' answers and the few labels."""
    labels = hide_labels(digits.labels, options.labels, seed)
    batches = Batches(digits.images, labels, options.batch_size, shift, seed)
    student, optimizer = new_student(options, seed)
    started = time.monotonic()

    # This is all that service distillation needs in a training script: a reader around the script's own batches.
    # Teachers may come and go meanwhile.
    with DistillReader(
        batches,
        inputs=["image", None],  # the parts of a batch: None is not sent to teachers
        outputs=["logits"],  # the teachers' outputs, appended to the batch
        teachers=options.distill_teachers,
        teacher_batch_size=options.batch_size,  # one request is one batch
        reporter=reporter,
    ) as reader:
        for _ in range(options.epochs):
            for images, labels, teacher_logits in reader:
                loss = distill_loss(
                    student(paddle.to_tensor(images)),
                    paddle.to_tensor(labels),
                    paddle.to_tensor(teacher_logits),
                    temperature=options.temperature,
                    weight=options.weight,
                )
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
                reporter.report(loss=float(loss))

    samples_per_s = reader.stats().samples / (time.monotonic() - started)
    return Trained(student, accuracy_of(student, digits), samples_per_s, reader.stats())


def train_alone(digits: Digits, options: argparse.Namespace, seed: int, reporter: JobReporter) -> Trained:
    """Train for as many steps on the labelled images, repeated."""
    known = np.flatnonzero(hide_labels(digits.labels, options.labels, seed) != UNLABELLED)
    often = np.resize(known, len(digits.labels))
    batches = Batches(digits.images[often], digits.labels[often], options.batch_size, shift, seed)
    student, optimizer = new_student(options, seed)
    started = time.monotonic()
    for _ in range(options.epochs):
        for images, labels in batches:
            loss = F.cross_entropy(student(paddle.to_tensor(images)), paddle.to_tensor(labels))
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            reporter.advance(len(labels))
            reporter.report(loss=float(loss))
    samples_per_s = options.epochs * len(batches) * options.batch_size / (time.monotonic() - started)
    return Trained(student, accuracy_of(student, digits), samples_per_s)


def ask_teachers(digits: Digits, options: argparse.Namespace, reporter: JobReporter) -> tuple[float, Mapping[str, int]]:
    """Return the teachers' accuracy on the held-out digits, 0 to 1, and the requests by teacher."""
    with DistillReader(
        [(digits.test_images, digits.test_labels)],
        inputs=["image", None],
        outputs=["logits"],
        teachers=options.distill_teachers,
        teacher_batch_size=len(digits.test_labels),
        reporter=reporter,
    ) as reader:
        ((_, labels, teacher_logits),) = reader
        return float((teacher_logits.argmax(axis=1) == labels).mean()), reader.stats().answered


def new_student(options: argparse.Namespace, seed: int) -> tuple[paddle.nn.Layer, paddle.optimizer.Optimizer]:
    """Return an untrained student, the same for the same seed, and its optimizer."""
    paddle.seed(seed)
    student = STUDENTS[options.model]()
    return student, paddle.optimizer.Adam(LEARNING_RATE, parameters=student.parameters())


def accuracy_of(student: paddle.nn.Layer, digits: Digits) -> float:
    """Return the share of the held-out digits that the student classifies correctly, 0 to 1."""
    return accuracy(student, digits.test_images, digits.test_labels)


def summary(trained: list[Trained]) -> dict[str, Any]:
    """Return the accuracies of all seeds with their mean and standard deviation, and the mean speed."""
    accuracies = [each.accuracy for each in trained]
    return {
        "accuracies": [round(value, 4) for value in accuracies],
        "accuracy_mean": round(statistics.mean(accuracies), 4),
        "accuracy_spread": round(statistics.stdev(accuracies), 4) if len(accuracies) > 1 else 0.0,
        "samples_per_s": round(statistics.mean(each.samples_per_s for each in trained)),
    }


def main() -> None:
    """Train for all seeds; write the checkpoint of the last student and the result."""
    options = _options()
    digits = load_digits(options.data_dir)
    seeds = range(options.seed, options.seed + options.seeds)
    train_it_alone = options.train_alone or not options.use_distill_service
    ways = train_it_alone + options.use_distill_service
    steps = ways * len(seeds) * options.epochs * (len(digits.labels) // options.batch_size)
    metrics: dict[str, Any] = {"labels": options.labels, "images": len(digits.labels), "seeds": list(seeds)}
    with JobReporter(total_steps=steps + options.use_distill_service) as reporter:
        trained = []
        if train_it_alone:
            for seed in seeds:
                reporter.report(note=f"alone, seed {seed}")
                trained.append(train_alone(digits, options, seed, reporter))
                print(f"alone, seed {seed}: accuracy {trained[-1].accuracy:.1%}", flush=True)
            metrics["alone"] = summary(trained)
        if options.use_distill_service:
            trained = []
            teacher_accuracy, by = ask_teachers(digits, options, reporter)
            metrics["teacher_accuracy"] = round(teacher_accuracy, 4)
            answered = Counter(by)
            for seed in seeds:
                reporter.report(note=f"distilled, seed {seed}")
                trained.append(train_distilled(digits, options, seed, reporter))
                answered.update(trained[-1].stats.answered)
                print(f"distilled, seed {seed}: accuracy {trained[-1].accuracy:.1%}", flush=True)
            metrics["distilled"] = summary(trained)
            metrics["answered"] = dict(answered)
    of_last = summary(trained)  # what `edl compare` reads
    metrics["accuracy"], metrics["samples_per_s"] = of_last["accuracy_mean"], of_last["samples_per_s"]
    metrics["batch_size"] = options.batch_size
    checkpoint = options.checkpoint.absolute()
    save_weights(trained[-1].student, checkpoint)
    write_result(checkpoint=str(checkpoint), metrics=metrics)
    print(f"the last student is in {checkpoint}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(STUDENTS), default="mlp", help="the student's network")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="caches the digits")
    parser.add_argument(
        "--use_distill_service", nargs="?", type=yes_or_no, const=True, default=False, help="train with teachers, too"
    )
    parser.add_argument("--train-alone", type=yes_or_no, default=True, help="train without teachers first, to compare")
    parser.add_argument(
        "--distill_teachers", type=fixed_teachers, help="host:port,…; by default EDL_TEACHERS or EDL_POOL"
    )
    parser.add_argument("--epochs", type=whole(1), default=24, help="passes over all images, for each seed")
    parser.add_argument("--batch-size", type=whole(1, TRAINED_ON), default=64)
    parser.add_argument(
        "--labels",
        type=whole(10, MOST_LABELS, multiple_of=10),
        default=100,
        help="known labels, the same number of each digit",
    )
    parser.add_argument("--temperature", type=above_zero, default=4.0, help="softens the teachers' answers")
    parser.add_argument(
        "--weight", type=share, default=0.9, help="of the teachers' answers relative to the labels, 0 to 1"
    )
    parser.add_argument("--seed", type=whole(0, LARGEST_SEED), default=0, help="the first seed")
    parser.add_argument("--seeds", type=whole(1), default=3, help="number of seeds, from the first on")
    parser.add_argument("--checkpoint", type=Path, default=Path("student.safetensors"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
