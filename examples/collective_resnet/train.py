r"""Trains a ResNet on an ImageFolder with any number of instances, by the flags of EDL's collective example.

    edl run --instances 1:4 -- python train.py --model=ResNet50 --data_dir=./ImageNet --total_batch_size=1024

A step has `--total_batch_size` pictures, however many instances share them.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import paddle
import paddle.nn.functional as F  # noqa: N812 -- as Paddle's own documents name it

from edl_runtime import elastic
from edl_runtime.elastic import Checkpoint, Run

sys.path.append(str(Path(__file__).resolve().parent.parent / "resnet_distill"))  # what it shares with these examples
sys.path.append(str(Path(__file__).resolve().parent.parent / "vision_distill"))
sys.path.append(str(Path(__file__).resolve().parent.parent / "mnist_distill"))

from flags import whole
from folders import Folder
from networks import save_weights
from recipe import Pixels, add_flags, count_right, learning_rate, load_weights, new_optimizer, parse
from resnets import MODELS
from vision_flags import run as run_script

MISSING = ("use_mixup", "use_aa", "is_distill", "use_dgc", "hdfs_name", "hdfs_ugi")
"""EDL's flags that would change the result; they are refused unless they are False."""


def main() -> None:
    """Train until all epochs are done, or this instance has to leave."""
    options = _options()
    paddle.device.set_device("gpu" if options.use_gpu else "cpu")
    train = Folder(options.data_dir / "train", options, augmented=True)
    held_out = Folder(options.data_dir / "val", options, augmented=False)
    paddle.seed(options.seed)
    random.seed(options.seed)

    run = elastic.init(_checkpoint(options))
    network = MODELS[options.model](options.class_dim)
    if options.pretrained_model:
        load_weights(network, options.pretrained_model)
    batch = options.total_batch_size
    rate = learning_rate(options, -(-len(train) // batch), batch)
    scaler = paddle.amp.GradScaler(enable=options.fp16)
    run.wrap(network, new_optimizer(options, network, rate), scaler=scaler if options.fp16 else None)
    data = run.data(
        train,
        global_batch=batch,
        micro_batch=options.batch_size,
        epochs=options.num_epochs,
        seed=options.seed,
        num_workers=options.num_workers,
    )
    pixels = Pixels(options)
    smoothed = options.label_smoothing_epsilon if options.use_label_smoothing else 0.0
    for epoch, batches in data.epochs():
        for images, labels in batches:
            with paddle.amp.auto_cast(enable=options.fp16):
                loss = F.cross_entropy(network(pixels.to_input(images)), labels, label_smoothing=smoothed)
            scaler.scale(loss).backward()
            before = run.step_number
            run.step(loss=loss)
            is_whole = run.step_number > before  # and not one of several parts
            if run.rank == 0 and is_whole and run.step_number % options.fetch_steps == 0:
                shown = f"loss {run.mean_loss:.3f}, rate {run.learning_rate:.4f}, {run.world_size} instances"
                print(f"step {run.step_number}: {shown}", flush=True)
        if options.do_test:
            first, five = test(run, network, held_out, pixels, options)
            run.metrics(acc1=first, acc5=five)
            if run.rank == 0:
                print(f"epoch {epoch}: acc1 {first:.2%}, acc5 {five:.2%}", flush=True)
    if run.rank == 0:
        save_weights(network, options.model_save_dir / options.model / "weights.safetensors")


def test(
    run: Run, network: paddle.nn.Layer, held_out: Folder, pixels: Pixels, options: argparse.Namespace
) -> tuple[float, float]:
    """Return the shares of pictures, 0 to 1, whose class is the first answer, and one of the first five.

    Each instance tests its part of them.
    """
    part = range(run.rank, len(held_out), run.world_size)
    batches = paddle.io.DataLoader(
        paddle.io.Subset(held_out, part), batch_size=options.batch_size, num_workers=options.num_workers
    )
    first, five = count_right(network, batches if part else (), pixels, options.class_dim)
    each = run.mean(len(part))
    return run.mean(first) / each, run.mean(five) / each


def _checkpoint(options: argparse.Namespace) -> Checkpoint | None:
    return Checkpoint(url=options.checkpoint, every_steps=options.save_steps) if options.checkpoint else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, MISSING)
    parser.set_defaults(model="ResNet50", lr_strategy="piecewise_decay", num_epochs=90)
    add = parser.add_argument
    add("--total_batch_size", type=whole(1), default=1024, help="of a step; --batch_size are at once on a device")
    add(
        "--checkpoint",
        default="",
        help="folder or URL of checkpoints, as s3://bucket/resnet; by default EDL_CHECKPOINT",
    )
    add("--save_steps", type=whole(1), default=500, help="steps between checkpoints in --checkpoint")
    return parse(parser, MISSING)


if __name__ == "__main__":
    run_script(main)
