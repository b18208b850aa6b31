"""Trains a network on handwritten digits, alone or with teachers: the quick start of EDL, with Paddle 3.

python train_with_fleet.py --save_serving_model True    # a teacher, in mnist_cnn_model
python train_with_fleet.py --use_distill_service True --distill_teachers 127.0.0.1:9292
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812 -- as Paddle's own documents name it
from paddle import nn

from edl_runtime.compat.paddle_edl import DistillReader  # was paddle_edl.distill.distill_reader

sys.path.append(str(Path(__file__).resolve().parent.parent / "mnist_distill"))  # its digits and its flags

BATCH_SIZE = 64
PREDICTION = "softmax_0.tmp_0"
"""What the saved network's output is called; that of EDL's example was fc_0.tmp_2."""

SERVER_CONFIG, CLIENT_CONFIG = Path("serving_server_conf.prototxt"), Path("serving_client_conf.prototxt")
VARIABLE = """{kind}_var {{
  name: "{name}"
  alias_name: "{name}"
  is_lod_tensor: false
  {kind}_type: 1
  {shape}
}}
"""


class ConvolutionalNetwork(nn.Sequential):
    """Two convolutions; returns the probability of each digit, [n, 10]."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2D(1, 20, 5), nn.ReLU(), nn.MaxPool2D(2, 2), nn.BatchNorm2D(20)),
            *(nn.Conv2D(20, 50, 5), nn.ReLU(), nn.MaxPool2D(2, 2)),
            *(nn.Flatten(), nn.Linear(50 * 4 * 4, 10), nn.Softmax()),
        )


def train(args: argparse.Namespace) -> nn.Layer:
    """Train, print the accuracy on held-out digits after each epoch, and keep them if that is wanted."""
    from digits import load_digits
    from networks import accuracy

    digits = load_digits(args.data_dir)
    test_images, test_labels = paddle.to_tensor(digits.test_images), paddle.to_tensor(digits.test_labels)
    rng = np.random.default_rng(0)

    def train_reader() -> Iterator[list[Any]]:
        for chosen in np.array_split(rng.permutation(len(digits.labels)), len(digits.labels) // BATCH_SIZE):
            yield [(digits.images[one], digits.labels[one : one + 1]) for one in chosen]

    if args.use_distill_service:
        dr = DistillReader(ins=["img", "label"], predicts=[PREDICTION])
        dr.set_teacher_batch_size(BATCH_SIZE)
        if args.distill_teachers:
            dr.set_fixed_teacher(args.distill_teachers)
        train_reader = dr.set_sample_list_generator(train_reader)

    paddle.seed(0)
    network = ConvolutionalNetwork()
    optimizer = paddle.optimizer.Momentum(0.001, momentum=0.9, parameters=network.parameters())
    accuracies = []
    for epoch in range(args.num_epochs):
        for batch in train_reader():
            img, label, *soft_label = (paddle.to_tensor(np.stack(slot)) for slot in zip(*batch, strict=True))
            prediction = network(img)
            if args.use_distill_service:
                loss = F.cross_entropy(prediction, soft_label[0], soft_label=True, use_softmax=False)
            else:
                loss = F.cross_entropy(prediction, label, use_softmax=False)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
        accuracies.append(accuracy(network, test_images, test_labels))
        print(f"epoch {epoch}: cost {float(loss):.4f}, accuracy {accuracies[-1]:.1%}")
    if args.curves:
        way = "distilled" if args.use_distill_service else "alone"
        args.curves.mkdir(parents=True, exist_ok=True)
        curve = {"way": way, "labels": None, "seed": 0, "accuracies": accuracies}
        (args.curves / f"{way}.json").write_text(json.dumps(curve))
    return network


def save_serving_model(network: nn.Layer, folder: Path, client_folder: Path) -> None:
    """Save the network as Paddle 2 does, which Paddle Serving reads, too, with its two configurations."""
    network.eval()
    image = paddle.static.InputSpec([None, 1, 28, 28], "float32", "img")
    with paddle.pir_utils.OldIrGuard():  # else it would be in the format of Paddle 3
        paddle.jit.save(network, str(folder / "model"), input_spec=[image])
    text = VARIABLE.format(kind="feed", name="img", shape="shape: 1 shape: 28 shape: 28")
    text += VARIABLE.format(kind="fetch", name=PREDICTION, shape="shape: 10")
    client_folder.mkdir(parents=True, exist_ok=True)
    (folder / SERVER_CONFIG).write_text(text)
    (client_folder / CLIENT_CONFIG).write_text(text)
    print(f"saved in {folder}: feed_names=['img'], fetch_names=[{PREDICTION!r}]")


def parse_args() -> argparse.Namespace:
    from flags import whole, yes_or_no

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--use_gpu", type=yes_or_no, default=False, help="True or False")
    parser.add_argument("--num_epochs", type=whole(1), default=5)
    parser.add_argument("--use_distill_service", type=yes_or_no, default=False, help="True or False")
    parser.add_argument("--save_serving_model", type=yes_or_no, default=False, help="True or False")
    parser.add_argument(
        "--distill_teachers", default="127.0.0.1:9292", help="host:port,…, or other servers' addresses; '' for EDL_POOL"
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="caches the digits")
    parser.add_argument("--curves", type=Path, help="folder for accuracies, which ../vision_distill/curves.py draws")
    return parser.parse_args()


if __name__ == "__main__":
    given = parse_args()
    paddle.set_device("gpu" if given.use_gpu else "cpu")
    trained = train(given)
    if given.save_serving_model:
        save_serving_model(trained, Path("mnist_cnn_model"), Path("serving_conf"))
