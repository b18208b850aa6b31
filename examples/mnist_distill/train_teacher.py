"""Trains the teacher on all labels and saves it as a Paddle inference model, for `edl teacher --model DIR`.

Does nothing when the same model exists.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flags import LARGEST_SEED, whole

if TYPE_CHECKING:
    from paddle import nn

HERE = Path(__file__).resolve().parent
BATCH_SIZE = 64
PEAK_LEARNING_RATE = 4e-3


def main() -> None:
    """Train, unless the model is up to date."""
    options = _options()
    recipe = _recipe(options)
    about = options.model_dir / "about.json"
    if about.exists() and (known := json.loads(about.read_text()))["recipe"] == recipe:
        print(f"{options.model_dir} is up to date: accuracy {known['accuracy']:.1%}", flush=True)
        return
    train(options, recipe)


def train(options: argparse.Namespace, recipe: str) -> None:
    """Train the teacher and save it."""
    import numpy as np
    import paddle
    import paddle.nn.functional as F  # noqa: N812 -- as Paddle's own documents name it
    from digits import load_digits, shift
    from networks import Teacher, accuracy

    paddle.seed(options.seed)
    rng = np.random.default_rng(options.seed)
    digits = load_digits(options.data_dir)
    test_images, test_labels = paddle.to_tensor(digits.test_images), paddle.to_tensor(digits.test_labels)
    teacher = Teacher()
    steps = len(digits.labels) // BATCH_SIZE
    rate = paddle.optimizer.lr.OneCycleLR(PEAK_LEARNING_RATE, total_steps=options.epochs * steps)
    optimizer = paddle.optimizer.Adam(rate, parameters=teacher.parameters())
    reached, started = 0.0, time.monotonic()
    for epoch in range(1, options.epochs + 1):
        for chosen in np.array_split(rng.permutation(len(digits.labels)), steps):
            images = paddle.to_tensor(shift(digits.images[chosen], rng))
            loss = F.cross_entropy(teacher(images), paddle.to_tensor(digits.labels[chosen]))
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            rate.step()
        reached = accuracy(teacher, test_images, test_labels)
        seconds = time.monotonic() - started
        print(
            f"epoch {epoch}/{options.epochs}: loss {float(loss):.3f}, accuracy {reached:.1%}, {seconds:.0f} s",
            flush=True,
        )
    _save(teacher, options.model_dir, {"recipe": recipe, "accuracy": reached})


def _save(teacher: nn.Layer, model_dir: Path, about: dict[str, Any]) -> None:
    import paddle
    from paddle.static import InputSpec

    partial = model_dir.with_name(f"partial-{model_dir.name}-{os.getpid()}")
    image = InputSpec([None, 1, 28, 28], "float32", "image")
    teacher.eval()
    paddle.jit.save(teacher, str(partial / "model"), input_spec=[image])
    (partial / "about.json").write_text(json.dumps(about))
    shutil.rmtree(model_dir, ignore_errors=True)
    partial.replace(model_dir)
    print(f"saved as an inference model in {model_dir}", flush=True)


def _recipe(options: argparse.Namespace) -> str:
    """Return a digest of code and flags: the same ones make the same model."""
    code = [(HERE / name).read_text() for name in ("digits.py", "networks.py", "train_teacher.py")]
    return hashlib.sha256("\n".join([*code, str(options.epochs), str(options.seed)]).encode()).hexdigest()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="caches the digits")
    parser.add_argument("--model-dir", type=Path, default=Path("teacher"), help="the model's folder")
    parser.add_argument("--epochs", type=whole(1), default=6)
    parser.add_argument("--seed", type=whole(0, LARGEST_SEED), default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
