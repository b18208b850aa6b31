r"""Trains a ResNet on an ImageFolder by the flags of EDL's own example, with teachers or alone.

    python train.py --model=ResNet50_vd --data_dir=./ImageNet --lr_strategy=cosine_warmup_decay \
        --use_distill_service=True --distill_teachers=127.0.0.1:9898

A model that was trained is also saved for `edl teacher --model output/MODEL/teacher`; so the same script trains the
teacher, or only saves it from weights: --model=ResNeXt101_32x16d_wsl --num_epochs=0 --pretrained_model=FILE.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812 -- as Paddle's own documents name it
import safetensors.numpy
from resnets import MODELS

from edl_runtime.distill import DistillReader, JobReporter, Normalise
from edl_runtime.distill.losses import distill_loss
from edl_runtime.errors import SpecError
from edl_runtime.result import write_result

sys.path.append(str(Path(__file__).resolve().parent.parent / "vision_distill"))  # what it shares with these examples
sys.path.append(str(Path(__file__).resolve().parent.parent / "mnist_distill"))

import teaching
from flags import LARGEST_SEED, above_zero, checked, fixed_teachers, share, whole, yes_or_no
from folders import Folder
from networks import save_weights
from pictures import DataError
from vision_flags import image_shape, run

WARMUP_EPOCHS = 5
PIECES = (30, 60, 80, 90)
"""Epochs after which the rate of piecewise_decay falls to a tenth."""

BASE_BATCH = 256
"""--lr is for a batch of this size."""

NO_EFFECT = (
    *("with_mem_opt", "with_inplace", "use_dali", "data_format", "scale_loss", "use_dynamic_loss_scaling", "profile"),
    *("fuse", "fuse_elewise_add_act_ops", "fuse_bn_act_ops", "nccl_comm_num", "use_hierarchical_allreduce"),
    *("num_threads", "num_iteration_per_drop_scope", "benchmark_test", "use_recompute", "interpolation"),
    *("mixup_alpha", "rampup_begin_step"),
)
"""EDL's flags that change nothing about the result; they are accepted."""

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
        self.rate = learning_rate(options, len(self.batches))
        decay = paddle.regularizer.L2Decay(options.l2_decay)
        self.optimizer = paddle.optimizer.Momentum(
            self.rate, options.momentum_rate, self.network.parameters(), weight_decay=decay
        )
        self.scaler = paddle.amp.GradScaler(enable=options.fp16)
        mean, std = ([255 * one for one in numbers] for numbers in (options.image_mean, options.image_std))
        self.normalise = Normalise(mean=tuple(mean), std=tuple(std))
        self.mean, self.std = (paddle.to_tensor(one, "float32").reshape([1, 3, 1, 1]) for one in (mean, std))
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
        logits = self.network(self._input(images))
        labels = paddle.to_tensor(np.asarray(labels))
        if teacher_logits is not None:
            return distill_loss(logits, labels, paddle.to_tensor(teacher_logits), temperature=1.0, weight=1.0)
        smoothed = self.options.label_smoothing_epsilon if self.options.use_label_smoothing else 0.0
        return F.cross_entropy(logits, labels, label_smoothing=smoothed)

    def _input(self, images: Any) -> paddle.Tensor:
        return (paddle.to_tensor(np.asarray(images)).astype("float32") - self.mean) / self.std

    def test(self, held_out: Folder) -> tuple[float, float]:
        """Return the shares of pictures, 0 to 1, whose class is the first answer, and one of the first five."""
        first = five = 0
        most = min(5, self.options.class_dim)
        self.network.eval()
        with paddle.no_grad():
            for images, labels in paddle.io.DataLoader(held_out, batch_size=self.options.batch_size):
                right = self.network(self._input(images)).topk(most)[1] == labels.unsqueeze(1)
                first += int(right[:, 0].sum())
                five += int(right.any(axis=1).sum())
        self.network.train()
        return first / len(held_out), five / len(held_out)


def learning_rate(options: argparse.Namespace, steps: int) -> paddle.optimizer.lr.LRScheduler:
    """Return the rate by step of --lr_strategy, with so many `steps` an epoch."""
    rates = paddle.optimizer.lr
    total = max(1, options.num_epochs * steps)
    scaled = options.lr * options.batch_size / BASE_BATCH
    warmup = min(WARMUP_EPOCHS * steps, total // 2)
    if options.lr_strategy == "cosine_decay":
        return rates.CosineAnnealingDecay(options.lr, total)
    if options.lr_strategy == "linear_decay":
        return rates.PolynomialDecay(options.lr, total, end_lr=0.0, power=1.0)
    if options.lr_strategy == "piecewise_decay":
        values = [scaled / 10**piece for piece in range(len(PIECES) + 1)]
        pieces = [epochs * steps - warmup for epochs in PIECES]  # counted from the end of the warm-up
        after, start = rates.PiecewiseDecay(pieces, values), options.lr
    else:
        after, start = rates.CosineAnnealingDecay(scaled, max(1, total - warmup)), 0.0
    return rates.LinearWarmup(after, warmup, start, scaled) if warmup else after


def load_weights(network: paddle.nn.Layer, file: Path) -> None:
    """Set a network's weights from a safetensors file. Raises SpecError."""
    try:
        weights = safetensors.numpy.load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise SpecError("pretrained_model", str(file), f"a readable safetensors file ({error})") from None
    own = {name: tuple(weight.shape) for name, weight in network.state_dict().items()}
    wrong = sorted(
        name for name in own.keys() | weights.keys() if name not in weights or own.get(name) != weights[name].shape
    )
    if wrong:
        allowed = (
            f"weights of the names and shapes of --model and --class_dim; {wrong[0]} and {len(wrong) - 1} more differ"
        )
        raise SpecError("pretrained_model", str(file), allowed)
    network.set_state_dict(weights)


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
    number = checked(float, math.isfinite, "a number")
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="ResNet50_vd")
    add("--data_dir", type=Path, default=Path("data/ILSVRC2012"), help="has train/CLASS/*.jpg and val/CLASS/*.jpg")
    add("--class_dim", type=whole(2), default=1000, help="number of classes")
    add("--image_shape", type=image_shape, default=(3, 224, 224), help="3,height,width")
    add("--batch_size", type=whole(2), default=32)
    add("--num_epochs", type=whole(0), default=120)
    add("--total_images", type=whole(1), help="EDL's; the pictures are counted")
    strategies = ("cosine_warmup_decay", "piecewise_decay", "cosine_decay", "linear_decay")
    add("--lr_strategy", choices=strategies, default=strategies[0], help="of the learning rate")
    add("--lr", type=above_zero, default=0.1, help="learning rate, of a batch of 256 for the first two strategies")
    add("--momentum_rate", type=share, default=0.9)
    add("--l2_decay", type=share, default=1e-4)
    add("--use_label_smoothing", type=yes_or_no, default=False)
    add("--label_smoothing_epsilon", type=share, default=0.2)
    add("--lower_scale", type=share, default=0.08, help="least share of a picture's area that is cropped")
    add("--lower_ratio", type=above_zero, default=3 / 4, help="least width over height of what is cropped")
    add("--upper_ratio", type=above_zero, default=4 / 3, help="largest width over height of what is cropped")
    add("--resize_short_size", type=whole(8), default=256, help="of held-out pictures, before the middle is cropped")
    add("--image_mean", nargs=3, type=number, default=(0.485, 0.456, 0.406))
    add("--image_std", nargs=3, type=above_zero, default=(0.229, 0.224, 0.225))
    add("--fp16", type=yes_or_no, default=False, help="mixed precision, on a GPU")
    add("--use_gpu", type=yes_or_no, default=paddle.is_compiled_with_cuda())
    add("--num_workers", type=whole(0), default=4, help="processes that decode pictures")
    add("--fetch_steps", type=whole(1), default=10, help="steps between two losses in the progress")
    add("--do_test", type=yes_or_no, default=True, help="EDL's; the model is always tested")
    add("--pretrained_model", type=Path, help="weights to begin with, as safetensors")
    add("--model_save_dir", type=Path, default=Path("output"))
    add("--use_distill_service", nargs="?", type=yes_or_no, const=True, default=False, help="train with teachers")
    add("--distill_teachers", type=fixed_teachers, help="host:port,…; by default EDL_TEACHERS or EDL_POOL")
    add("--seed", type=whole(0, LARGEST_SEED), default=0)
    for name in (*NO_EFFECT, *MISSING):
        add(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in MISSING:
        if (given := getattr(options, name)) and given.lower() not in {"false", "no", "0"}:
            parser.error(f"--{name}: got {given!r}, allowed is to leave it out: this example does not have it")
    if options.use_gpu and not paddle.is_compiled_with_cuda():
        parser.error("--use_gpu: got True, allowed is False with this Paddle, which is for CPUs")
    if options.fp16 and not options.use_gpu:
        parser.error("--fp16: got True, allowed is False without a GPU")
    if options.image_shape[0] != 3:
        parser.error("--image_shape: got grey pictures, allowed is 3,height,width")
    return options


if __name__ == "__main__":
    run(main)
