"""What trainings of ResNets share: EDL's flags, the learning rate by step, and the share of right answers."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import safetensors.numpy
from resnets import MODELS

from edl_runtime.errors import SpecError

sys.path.append(str(Path(__file__).resolve().parent.parent / "vision_distill"))  # what it shares with these examples
sys.path.append(str(Path(__file__).resolve().parent.parent / "mnist_distill"))

from flags import LARGEST_SEED, above_zero, checked, share, whole, yes_or_no
from vision_flags import image_shape

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


def learning_rate(options: argparse.Namespace, steps: int, batch: int) -> paddle.optimizer.lr.LRScheduler:
    """Return the rate by step of --lr_strategy, with so many `steps` an epoch, each of a `batch` of pictures."""
    rates = paddle.optimizer.lr
    total = max(1, options.num_epochs * steps)
    scaled = options.lr * batch / BASE_BATCH
    warmup = min(WARMUP_EPOCHS * steps, total // 2)
    if options.lr_strategy == "cosine_decay":
        return rates.CosineAnnealingDecay(options.lr, total)
    if options.lr_strategy == "linear_decay":
        return rates.PolynomialDecay(options.lr, total, end_lr=0.0, power=1.0)
    if options.lr_strategy == "piecewise_decay":
        values = [scaled / 10**piece for piece in range(len(PIECES) + 1)]
        pieces = [epochs * steps - warmup for epochs in PIECES]  # counted from the end of the warm-up
        start = options.lr if options.lr < scaled else 0.0  # EDL's start, which is too high for small batches
        after = rates.PiecewiseDecay(pieces, values)
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


class Pixels:
    """Turns bytes into a network's input, by --image_mean and --image_std. `mean`, `std`: of bytes, 0 to 255."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.mean, self.std = (
            tuple(255 * one for one in numbers) for numbers in (options.image_mean, options.image_std)
        )
        self._mean, self._std = (
            paddle.to_tensor(one, "float32").reshape([1, 3, 1, 1]) for one in (self.mean, self.std)
        )

    def to_input(self, images: Any) -> paddle.Tensor:
        """Return bytes of [n, 3, height, width] as float32."""
        return (paddle.to_tensor(np.asarray(images)).astype("float32") - self._mean) / self._std


def count_right(network: paddle.nn.Layer, batches: Iterable[Any], pixels: Pixels, classes: int) -> tuple[int, int]:
    """Return for how many pictures the class is the first answer, and for how many one of the first five."""
    first = five = 0
    network.eval()
    with paddle.no_grad():
        for images, labels in batches:
            right = network(pixels.to_input(images)).topk(min(5, classes))[1] == labels.unsqueeze(1)
            first += int(right[:, 0].sum())
            five += int(right.any(axis=1).sum())
    network.train()
    return first, five


def new_optimizer(options: argparse.Namespace, network: paddle.nn.Layer, rate: Any) -> paddle.optimizer.Optimizer:
    """Return the optimizer of EDL's script."""
    decay = paddle.regularizer.L2Decay(options.l2_decay)
    return paddle.optimizer.Momentum(rate, options.momentum_rate, network.parameters(), weight_decay=decay)


def add_flags(parser: argparse.ArgumentParser, missing: Sequence[str]) -> None:
    """Add EDL's flags; those that are `missing` are refused by `parse`."""
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
    add("--seed", type=whole(0, LARGEST_SEED), default=0)
    for name in (*NO_EFFECT, *missing):
        add(f"--{name}", help=argparse.SUPPRESS)


def parse(parser: argparse.ArgumentParser, missing: Sequence[str]) -> argparse.Namespace:
    """Return the options; ends the script for flags that can't be used."""
    options = parser.parse_args()
    for name in missing:
        if (given := getattr(options, name)) and given.lower() not in {"false", "no", "0"}:
            parser.error(f"--{name}: got {given!r}, allowed is to leave it out: this example does not have it")
    if options.use_gpu and not paddle.is_compiled_with_cuda():
        parser.error("--use_gpu: got True, allowed is False with this Paddle, which is for CPUs")
    if options.fp16 and not options.use_gpu:
        parser.error("--fp16: got True, allowed is False without a GPU")
    if options.image_shape[0] != 3:
        parser.error("--image_shape: got grey pictures, allowed is 3,height,width")
    return options
