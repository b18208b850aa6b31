r"""Trains a ResNet on an ImageFolder by the flags of EDL's own example, with teachers or alone.

    python train.py --model=ResNet50_vd --data_dir=./ImageNet --lr_strategy=cosine_warmup_decay \
        --use_distill_service=True --distill_teachers=127.0.0.1:9898

A model that was trained is also saved for `edl teacher --model output/MODEL/teacher`; so the same script trains the
teacher, or only saves it from weights: --model=ResNeXt101_32x16d_wsl --num_epochs=0 --pretrained_model=FILE.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812 -- as Paddle's own documents name it
from recipe import Pixels, add_flags, count_right, learning_rate, load_weights, new_optimizer, parse
from resnets import MODELS

from edl_runtime.distill import DistillReader, JobReporter, Normalise
from edl_runtime.distill.losses import distill_loss
from edl_runtime.result import write_result

sys.path.append(str(Path(__file__).resolve().parent.parent / "vision_distill"))  # what it shares with these examples
sys.path.append(str(Path(__file__).resolve().parent.parent / "mnist_distill"))

import teaching
from flags import fixed_teachers, yes_or_no
from folders import Folder
from networks import save_weights
from pictures import DataError
from vision_flags import run

MISSING = ("use_mixup", "use_aa", "is_distill", "use_dgc", "checkpoint")
"""EDL's flags that would change the result; they are refused unless they are False."""


class Training:
    """One network and its training."""

    def __init__(self, options: argparse.Namespace, train: Folder, reporter: JobReporter) -> None:
        self.options = options
        self.reporter = reporter
        paddle.seed(options.seed)
        random.seed(options.seed)
        np.random.seed(options.seed)  # noqa: NPY002 -- which Paddle shuffles by
        self.batches = paddle.io.DataLoader(
            train,
            places=paddle.CPUPlace(),
            batch_size=options.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=options.num_workers,
        )
        self.network = MODELS[options.model](options.class_dim)
        if options.pretrained_model:
            load_weights(self.network, options.pretrained_model)
        self.rate = learning_rate(options, len(self.batches), options.batch_size)
        self.optimizer = new_optimizer(options, self.network, self.rate)
        self.scaler = paddle.amp.GradScaler(enable=options.fp16)
        self.pixels = Pixels(options)
        self.normalise = Normalise(mean=self.pixels.mean, std=self.pixels.std)
        self.seconds = 0.0

    def train(self) -> Mapping[str, int]:
        """Train for all epochs; return the requests by teacher."""
        if not self.options.use_distill_service:
            self._fit(self.batches)
            return {}
        with DistillReader(
            self.batches,
            inputs=["image", None],
            outputs=["logits"],
            normalise={"image": self.normalise},  # pictures travel as bytes
            teachers=self.options.distill_teachers,
            reporter=self.reporter,
        ) as reader:
            self._fit(reader)
            return reader.stats().answered

    def _fit(self, source: Any) -> None:
        step = 0
        for epoch in range(1, self.options.num_epochs + 1):
            started = time.monotonic()
            for images, labels, *answers in source:
                with paddle.amp.auto_cast(enable=self.options.fp16):
                    loss = self._loss(images, labels, *answers)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.clear_grad()
                self.rate.step()
                step += 1
                if not answers:
                    self.reporter.advance(self.options.batch_size)
                if step % self.options.fetch_steps == 0:
                    self.reporter.report(loss=float(loss), epoch=epoch)
            self.seconds += time.monotonic() - started

    def _loss(self, images: Any, labels: Any, teacher_logits: Any = None) -> paddle.Tensor:
        """Return the cross entropy with the labels, or, as EDL has it, with the teachers' answers alone."""
        logits = self.network(self.pixels.to_input(images))
        labels = paddle.to_tensor(np.asarray(labels))
        if teacher_logits is not None:
            return distill_loss(logits, labels, paddle.to_tensor(teacher_logits), temperature=1.0, weight=1.0)
        smoothed = self.options.label_smoothing_epsilon if self.options.use_label_smoothing else 0.0
        return F.cross_entropy(logits, labels, label_smoothing=smoothed)

    def test(self, held_out: Folder) -> tuple[float, float]:
        """Return the shares of pictures, 0 to 1, whose class is the first answer, and one of the first five."""
        batches = paddle.io.DataLoader(held_out, batch_size=self.options.batch_size)
        first, five = count_right(self.network, batches, self.pixels, self.options.class_dim)
        return first / len(held_out), five / len(held_out)


def main() -> None:
    """Train, test, and save the weights, the teacher's model and the result."""
    options = _options()
    paddle.device.set_device("gpu" if options.use_gpu else "cpu")
    train = Folder(options.data_dir / "train", options, augmented=True)
    held_out = Folder(options.data_dir / "val", options, augmented=False)
    if options.num_epochs and len(train) < options.batch_size:
        raise DataError(
            options.data_dir / "train", f"{len(train)} pictures", f"--batch_size, {options.batch_size}, or more"
        )
    with JobReporter(total_steps=options.num_epochs * (len(train) // options.batch_size) or None) as reporter:
        training = Training(options, train, reporter)
        answered = training.train()
    first, five = training.test(held_out)
    print(f"{options.model}: acc1 {first:.2%}, acc5 {five:.2%}", flush=True)
    folder = (options.model_save_dir / options.model).absolute()
    weights = folder / "weights.safetensors"
    save_weights(training.network, weights)
    teaching.save(training.network, folder / "teacher", options.image_shape, {"accuracy": first})
    samples = options.num_epochs * len(training.batches) * options.batch_size
    metrics = {
        "accuracy": round(first, 4),
        "acc5": round(five, 4),
        "samples_per_s": round(samples / training.seconds, 1) if samples else 0.0,
        "batch_size": options.batch_size,
        "answered": dict(answered),
    }
    write_result(checkpoint=str(weights), metrics=metrics)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, MISSING)
    add = parser.add_argument
    add("--use_distill_service", nargs="?", type=yes_or_no, const=True, default=False, help="train with teachers")
    add("--distill_teachers", type=fixed_teachers, help="host:port,…; by default EDL_TEACHERS or EDL_POOL")
    return parse(parser, MISSING)


if __name__ == "__main__":
    run(main)
