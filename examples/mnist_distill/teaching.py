"""What all teachers have in common: their training on all labels, and their files for `edl teacher --model DIR`."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flags import LARGEST_SEED, whole

if TYPE_CHECKING:
    import numpy as np
    from paddle import nn

HERE = Path(__file__).resolve().parent
BATCH_SIZE = 64
PEAK_LEARNING_RATE = 4e-3


class Course(NamedTuple):
    """A teacher's training: an untrained network, and what it learns from.

    - `data`: samples and labels for training, and those that are held out.
    - `augment`: changes a batch of samples at random.
    - `tokenizer`: the content of tokenizer.json, where samples are tokens.
    """

    teacher: nn.Layer
    data: tuple[Any, Any, Any, Any]
    augment: Callable[[Any, np.random.Generator], Any]
    tokenizer: str = ""


def add_flags(parser: argparse.ArgumentParser, epochs: int) -> None:
    """Add the flags that `train` reads; `epochs` is the default."""
    parser.add_argument("--model-dir", "--model_dir", type=Path, default=Path("teacher"), help="the model's folder")
    parser.add_argument("--epochs", "--num_epochs", type=whole(1), default=epochs)
    parser.add_argument("--seed", type=whole(0, LARGEST_SEED), default=0)


def train(
    prepare: Callable[[], Course], options: argparse.Namespace, *, code: Sequence[Path], about_data: object
) -> None:
    """Train a teacher for `options.epochs` and save it in `options.model_dir`, unless the same one is there.

    It is the same if its files, `code`, and what it learns from, `about_data`, are what they were, with equal epochs
    and seed. `prepare` is called after the seed is set.
    """
    recipe = _recipe([*code, HERE / "networks.py", HERE / "teaching.py"], about_data, options.epochs, options.seed)
    about = options.model_dir / "about.json"
    if about.exists() and (known := json.loads(about.read_text()))["recipe"] == recipe:
        print(f"{options.model_dir} is up to date: accuracy {known['accuracy']:.1%}", flush=True)
        return

    import numpy as np
    import paddle
    import paddle.nn.functional as F  # noqa: N812 -- as Paddle's own documents name it
    from networks import accuracy, to_input

    paddle.seed(options.seed)
    rng = np.random.default_rng(options.seed)
    course = prepare()
    teacher, (samples, labels, *test) = course.teacher, course.data
    steps = max(1, len(labels) // BATCH_SIZE)
    rate = paddle.optimizer.lr.OneCycleLR(PEAK_LEARNING_RATE, total_steps=options.epochs * steps)
    optimizer = paddle.optimizer.Adam(rate, parameters=teacher.parameters())
    reached, started = 0.0, time.monotonic()
    for epoch in range(1, options.epochs + 1):
        for chosen in np.array_split(rng.permutation(len(labels)), steps):
            batch = to_input(course.augment(samples[chosen], rng))
            loss = F.cross_entropy(teacher(batch), paddle.to_tensor(labels[chosen]))
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            rate.step()
        reached = accuracy(teacher, *test)
        seconds = time.monotonic() - started
        print(
            f"epoch {epoch}/{options.epochs}: loss {float(loss):.3f}, accuracy {reached:.1%}, {seconds:.0f} s",
            flush=True,
        )
    about_it = {"recipe": recipe, "accuracy": reached}
    save(teacher, options.model_dir, samples.shape[1:], about_it, course.tokenizer)


def save(
    teacher: nn.Layer,
    model_dir: Path,
    shape: Sequence[int],
    about: dict[str, Any],
    tokenizer: str = "",
) -> None:
    """Save an inference model, with `about` in about.json, atomically.

    It takes "image", [B, *shape] float32, or with a `tokenizer`, which tokenizer.json then has, "tokens", int64.
    """
    import paddle
    from paddle.static import InputSpec

    partial = model_dir.with_name(f"partial-{model_dir.name}-{os.getpid()}")
    teacher.eval()
    kind = ("int64", "tokens") if tokenizer else ("float32", "image")
    paddle.jit.save(teacher, str(partial / "model"), input_spec=[InputSpec([None, *shape], *kind)])
    (partial / "about.json").write_text(json.dumps(about))
    if tokenizer:
        (partial / "tokenizer.json").write_text(tokenizer, "utf-8")
    shutil.rmtree(model_dir, ignore_errors=True)
    partial.replace(model_dir)
    print(f"saved as an inference model in {model_dir}", flush=True)


def _recipe(code: Sequence[Path], *settings: object) -> str:
    """Return a digest of code and settings: the same ones make the same model."""
    return hashlib.sha256("\n".join([*(file.read_text() for file in code), *map(str, settings)]).encode()).hexdigest()
