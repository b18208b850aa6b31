"""A training script of two models, each with its optimizer, that are trained against each other."""

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
    "in_turn": False,  # whether each model has batches of its own, or both train on each
    "gates": [],  # steps that wait for the test
    **json.loads(os.environ.get("SCRIPT_OPTIONS", "{}")),
}


def main(out: Path) -> None:
    """Train both, and save them in `out`."""
    draws = np.random.default_rng(0)
    real = draws.normal(2.0, 0.5, size=(40, 2)).astype("float32")
    noise = draws.normal(size=(40, 3)).astype("float32")
    run = elastic.init()
    paddle.seed(1)
    generator = paddle.nn.Linear(3, 2)
    critic = paddle.nn.Sequential(paddle.nn.Linear(2, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 1))
    decay = paddle.optimizer.lr.ExponentialDecay(0.05, 0.95)
    (generator, _), (critic, critic_optimizer) = run.wrap(
        (generator, paddle.optimizer.Adam(decay, parameters=generator.parameters())),
        (critic, paddle.optimizer.Momentum(0.02, parameters=critic.parameters())),
    )
    for x, z in run.data(list(zip(real, noise, strict=True)), global_batch=8, epochs=6):
        made, step = generator(z), run.step_number + 1
        if not OPTIONS["in_turn"] or run.step_number % 2:
            loss = -critic(made).mean()
            loss.backward()
            critic_optimizer.clear_grad()  # gradients of the generator's loss
        if not OPTIONS["in_turn"] or run.step_number % 2 == 0:
            loss = critic(made.detach()).mean() - critic(x).mean()
            loss.backward()
        (out / f"at-{step}-{os.getpid()}").touch()
        while step in OPTIONS["gates"] and not (out / f"gate-{step}").exists():
            time.sleep(0.01)
        run.step(loss)
    models = {"generator": generator, "critic": critic}
    kept = {f"{word} {name}": each.numpy() for word, model in models.items() for name, each in model.named_parameters()}
    np.savez(out / f"ended-{os.getpid()}.npz", **kept)
    summary = {"step": run.step_number, "rates": [run.learning_rate, critic_optimizer.get_lr()]}
    (out / f"ended-{os.getpid()}.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
