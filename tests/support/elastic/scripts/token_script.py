"""A training script of a language model: sequences of unequal length, and a loss that is the mean over their tokens."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from edl_runtime import elastic

OPTIONS: dict[str, Any] = {
    "weighted": True,
    "micro_batch": None,
    "gates": [],  # steps that wait for the test
    **json.loads(os.environ.get("SCRIPT_OPTIONS", "{}")),
}
WORDS, LENGTH, SEQUENCES = 7, 6, 24


def main(out: Path) -> None:
    """Train, and save the weights in `out`."""
    draws = np.random.default_rng(0)
    texts = draws.integers(0, WORDS, size=(SEQUENCES, LENGTH + 1))
    lengths = draws.integers(1, LENGTH + 1, size=SEQUENCES)
    lengths[4:6] = 0  # of three ranks the last one has no token in the first batch
    masks = (np.arange(LENGTH) < lengths[:, None]).astype("float32")
    run = elastic.init()
    paddle.seed(1)
    model = paddle.nn.Sequential(paddle.nn.Embedding(WORDS, 5), paddle.nn.Linear(5, WORDS))
    run.wrap(model, paddle.optimizer.Momentum(0.2, parameters=model.parameters()))
    data = run.data(
        list(zip(texts, masks, strict=True)),
        global_batch=6,
        epochs=10,
        shuffle=False,
        micro_batch=OPTIONS["micro_batch"],
    )
    losses = {}
    for text, mask in data:
        each = paddle.nn.functional.cross_entropy(model(text[:, :-1]), text[:, 1:], reduction="none").squeeze(-1)
        tokens = mask.sum()
        loss = (each * mask).sum() / (tokens if OPTIONS["weighted"] else tokens.clip(min=1))
        loss.backward()
        step = run.step_number + 1
        (out / f"at-{step}-{os.getpid()}").touch()
        while step in OPTIONS["gates"] and not (out / f"gate-{step}").exists():
            time.sleep(0.01)
        run.step(loss, weight=tokens if OPTIONS["weighted"] else None)
        if run.step_number == step:
            losses[f"loss {step}"] = run.mean_loss
    np.savez(out / f"ended-{os.getpid()}.npz", **{name: each.numpy() for name, each in model.state_dict().items()})
    (out / f"ended-{os.getpid()}.json").write_text(json.dumps({name: losses[name] for name in ("loss 39", "loss 40")}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
