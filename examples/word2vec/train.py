"""Trains the N-gram model of Paddle's word2vec tutorial, by instances that may join and leave meanwhile.

    python train.py --data grams                                                      # one instance
    edl run --instances 1:3 --name word2vec train.py --data grams
    edl resize word2vec 3                                                             # from another shell

--data is the folder of prepare.py. After each pass it prints the error on the n-grams for the test, and writes the
words and their embeddings to --model_dir, in the tutorial's files.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F  # noqa: N812 -- as Paddle's own documents name it
from corpus import N
from embeddings import load_words, save_embeddings
from flags import LARGEST_SEED, whole
from network import NGram, adagrad

from edl_runtime import elastic
from edl_runtime.shards.dataset import list_shards, read_shard

SHOWN_EVERY = 100
"""Batches."""

TESTED_AT_ONCE = 2048

Grams = npt.NDArray[np.int64]  # [n, N]


def main() -> None:
    """Train until all passes are done, or this instance has to leave."""
    options = _options()
    words = load_words(options.data)
    grams, test = load_grams(options.data / "train"), load_grams(options.data / "test")
    paddle.seed(options.seed)

    run = elastic.init()
    model = NGram(len(words))
    run.wrap(model, adagrad(model))
    batches = run.data(
        grams, global_batch=options.batch_size, epochs=options.passes, seed=options.seed, collate_fn=np.stack
    )
    for number, steps in batches.epochs():
        first = number * -(-len(grams) // options.batch_size)
        for batch in steps:
            logits = model(batch[:, : N - 1])
            loss = F.cross_entropy(logits, batch[:, N - 1])
            loss.backward()
            time.sleep(options.pause_s)
            run.step(loss=loss)
            if (run.step_number - first) % SHOWN_EVERY == 0:
                error = run.mean(error_of(logits, batch[:, N - 1]))
                tell(run, f"Batch {run.step_number - first}, Cost {run.mean_loss:f}, {evaluated(error)}", number)
        error = run.mean(test_error(model, test[run.rank :: run.world_size]))
        run.metrics(test_error=error)
        tell(run, f"Testing metrics {evaluated(error)}", number)
        if run.rank == 0:
            save_embeddings(options.model_dir, words, model.embedding.weight.numpy())


def load_grams(folder: Path) -> Grams:
    """Return all records of a set of shards. Every instance has all of them, and trains on its part of each batch."""
    return np.array([gram for shard in list_shards(str(folder)) for gram in read_shard(shard)], np.int64)


def tell(run: elastic.Run, text: str, number: int) -> None:
    """Print a line of a pass, once for all instances."""
    if run.rank == 0:
        print(f"Pass {number}, {text}", flush=True)


def evaluated(error: float) -> dict[str, float]:
    """Return the metrics as the tutorial prints them."""
    return {"classification_error_evaluator": round(error, 6)}


def error_of(logits: Any, labels: Any) -> float:
    """Return the share of labels that are not the likeliest."""
    return float((logits.argmax(-1) != labels).astype("float32").mean())


def test_error(model: NGram, test: Grams) -> float:
    """Return the share of n-grams whose last word is not predicted."""
    model.eval()
    wrong = 0.0
    with paddle.no_grad():
        for start in range(0, len(test), TESTED_AT_ONCE):
            part = paddle.to_tensor(test[start : start + TESTED_AT_ONCE])
            wrong += error_of(model(part[:, : N - 1]), part[:, N - 1]) * len(part)
    model.train()
    return wrong / len(test)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--data", type=Path, default=Path("grams"), help="the folder of prepare.py")
    parser.add_argument("--model_dir", type=Path, default=Path("model"), help="for words and embeddings")
    parser.add_argument("--passes", type=whole(1), default=3)
    parser.add_argument("--batch_size", type=whole(1), default=256, help="n-grams a step, of all instances together")
    parser.add_argument("--pause_s", type=float, default=0.0, help="seconds added to each step, to watch it")
    parser.add_argument("--seed", type=whole(0, LARGEST_SEED), default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
