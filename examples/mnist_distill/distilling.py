"""What the students of all data sets have in common: their flags, their training, and what they write at the end.

This is the training loop to read: with teachers, a DistillReader stands around the script's own batches.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F  # noqa: N812 -- as Paddle's own documents name it
from batches import Augment, Batches
from flags import LARGEST_SEED, above_zero, fixed_teachers, share, whole, yes_or_no
from networks import accuracy, save_weights, to_input

from edl_runtime.distill import DistillReader, JobReporter, Normalise
from edl_runtime.distill.losses import UNLABELLED, distill_loss
from edl_runtime.errors import SpecError
from edl_runtime.result import write_result


class Lesson(NamedTuple):
    """What a student learns from.

    - `samples`, `labels`: for training; a label is UNLABELLED where it is not known.
    - `test_samples`, `test_labels`: held out.
    - `augment`: changes a batch of samples at random.
    - `input`: the name of the teachers' input; `normalise` as in DistillReader.
    - `tokenizer`: the file that made the samples of texts.
    """

    samples: npt.NDArray[Any]
    labels: npt.NDArray[np.int64]
    test_samples: npt.NDArray[Any]
    test_labels: npt.NDArray[np.int64]
    augment: Augment
    input: str
    normalise: Mapping[str, Normalise] = MappingProxyType({})
    tokenizer: Path | None = None


def add_flags(
    parser: argparse.ArgumentParser, *, epochs: int, batch_size: int, lr: float, temperature: float, weight: float
) -> None:
    """Add the flags that `study` reads; the arguments are defaults."""
    parser.add_argument(
        "--use_distill_service", nargs="?", type=yes_or_no, const=True, default=False, help="train with teachers"
    )
    parser.add_argument(
        "--distill_teachers", type=fixed_teachers, help="host:port,…; by default EDL_TEACHERS or EDL_POOL"
    )
    parser.add_argument("--num_epochs", type=whole(1), default=epochs, help="passes over all that is for training")
    parser.add_argument("--batch_size", type=whole(1), default=batch_size)
    parser.add_argument("--lr", type=above_zero, default=lr, help="learning rate at first; it falls to 0 by a cosine")
    parser.add_argument("--temperature", type=above_zero, default=temperature, help="softens the teachers' answers")
    parser.add_argument("--weight", type=share, default=weight, help="of the teachers' answers against labels, 0 to 1")
    parser.add_argument("--seed", type=whole(0, LARGEST_SEED), default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("student.safetensors"))
    parser.add_argument("--curves", type=Path, help="folder for the accuracy after each epoch, which curves.py draws")


def study(student: paddle.nn.Layer, lesson: Lesson, options: argparse.Namespace) -> None:
    """Train a student; write its checkpoint, the result, and the curve if that is wanted.

    Steps and batches are the same with teachers and without. Raises SpecError for less samples than a batch has, and
    for teachers of other classes.
    """
    if options.batch_size > len(lesson.labels):
        raise SpecError("batch_size", options.batch_size, f"at most {len(lesson.labels):,}, the number of samples")
    steps = options.num_epochs * (len(lesson.labels) // options.batch_size)
    with JobReporter(total_steps=steps) as reporter:
        training = _Training(student, lesson, options, steps, reporter)
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
    save_weights(student, checkpoint)
    write_result(checkpoint=str(checkpoint), metrics=metrics)
    print(f"{way}: accuracy {training.accuracies[-1]:.2%}; the student is in {checkpoint}", flush=True)


class _Training:
    """One student, its training, and its accuracy after each epoch."""

    def __init__(
        self, student: paddle.nn.Layer, lesson: Lesson, options: argparse.Namespace, steps: int, reporter: JobReporter
    ) -> None:
        self.student = student
        self.lesson = lesson
        self.options = options
        self.reporter = reporter
        self.accuracies: list[float] = []
        self.seconds = 0.0
        self.rate = paddle.optimizer.lr.CosineAnnealingDecay(options.lr, T_max=steps)
        self.optimizer = paddle.optimizer.Adam(self.rate, parameters=student.parameters())

    def train(self) -> Mapping[str, int]:
        """Train for all epochs; return the requests by teacher."""
        lesson, options = self.lesson, self.options
        samples, labels = lesson.samples, lesson.labels
        if not options.use_distill_service:
            known = np.resize(np.flatnonzero(labels != UNLABELLED), len(labels))
            self._fit(Batches(samples[known], labels[known], options.batch_size, lesson.augment, options.seed))
            return {}
        with DistillReader(
            Batches(samples, labels, options.batch_size, lesson.augment, options.seed),
            inputs=[lesson.input, None],
            outputs=["logits"],
            normalise=lesson.normalise,
            tokenizer=lesson.tokenizer,
            teachers=options.distill_teachers,
            epochs=options.num_epochs,
            reporter=self.reporter,
        ) as reader:
            self._fit(reader)
            return reader.stats().answered

    def _fit(self, source: Iterable[Any]) -> None:
        """Train on batches of samples and labels, with teachers' logits or without."""
        for epoch in range(1, self.options.num_epochs + 1):
            started = time.monotonic()
            for samples, labels, *answers in source:
                loss = self._loss(samples, labels, *answers)
                loss.backward()
                self.optimizer.step()
                self.optimizer.clear_grad()
                self.rate.step()
                if not answers:
                    self.reporter.advance(len(labels))
                self.reporter.report(loss=float(loss), epoch=epoch)
            self.seconds += time.monotonic() - started
            self.accuracies.append(accuracy(self.student, self.lesson.test_samples, self.lesson.test_labels))
            print(f"epoch {epoch}/{self.options.num_epochs}: accuracy {self.accuracies[-1]:.2%}", flush=True)

    def _loss(self, samples: Any, labels: Any, teacher_logits: Any = None) -> paddle.Tensor:
        logits = self.student(to_input(samples))
        if teacher_logits is None:
            return F.cross_entropy(logits, paddle.to_tensor(labels))
        if teacher_logits.shape[1] != logits.shape[1]:
            raise SpecError("classes of the data", logits.shape[1], f"the teachers' {teacher_logits.shape[1]}")
        return distill_loss(
            logits,
            paddle.to_tensor(labels),
            paddle.to_tensor(teacher_logits),
            temperature=self.options.temperature,
            weight=self.options.weight,
        )
