"""A training script with registered state: averaged weights and early stopping. Its model has an average, too."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from edl_runtime import elastic

OPTIONS: dict[str, Any] = {
    "epochs": 40,
    "gates": [],  # steps that wait for the test
    **json.loads(os.environ.get("SCRIPT_OPTIONS", "{}")),
}
DECAY = 0.9
MOST_MISSES = 2


class Average:
    """The averaged weights of a model."""

    def __init__(self, model: Any) -> None:
        self.updates = 0
        self.weights = arrays_of(model)

    def update(self, model: Any) -> None:
        self.updates += 1
        for name, value in arrays_of(model).items():
            self.weights[name] = DECAY * self.weights[name] + (1 - DECAY) * value

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "weights": self.weights}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.weights = state["updates"], state["weights"]


class Net(paddle.nn.Layer):  # type: ignore[misc]
    """A layer, and a frozen one that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.average = paddle.nn.Linear(4, 1), paddle.nn.Linear(4, 1)
        self.register_buffer("updates", paddle.zeros([1], "int64"))
        for mine, theirs in zip(self.average.parameters(), self.layer.parameters(), strict=True):
            mine.set_value(theirs)
            mine.stop_gradient = True

    def forward(self, inputs: Any) -> Any:
        return self.layer(inputs)

    def follow(self) -> None:
        self.updates.set_value(self.updates + 1)
        for mine, theirs in zip(self.average.parameters(), self.layer.parameters(), strict=True):
            mine.set_value(DECAY * mine + (1 - DECAY) * theirs)


def arrays_of(model: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def main(out: Path) -> None:
    """Train until the held-out error stops falling, and save the state in `out`."""
    draws = np.random.default_rng(0)
    inputs = draws.normal(size=(50, 4)).astype("float32")
    labels = (inputs @ draws.normal(size=(4, 1)) + draws.normal(size=(50, 1))).astype("float32")
    held_out = inputs[26:], labels[26:]
    run = elastic.init()
    paddle.seed(1)
    model = Net()
    optimizer = paddle.optimizer.Momentum(0.02, parameters=model.parameters())
    average = run.register("average", Average(model))
    stopping = run.register("stopping", {"best": math.inf, "misses": 0, "errors": [], "steps": 0})
    run.wrap(model, optimizer)
    # the last batch of an epoch has two samples, so that one rank of three has none
    data = run.data(list(zip(inputs[:26], labels[:26], strict=True)), global_batch=8, epochs=OPTIONS["epochs"])
    for _, batches in data.epochs():
        for x, y in batches:
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            step = run.step_number + 1
            (out / f"at-{step}-{os.getpid()}").touch()
            while step in OPTIONS["gates"] and not (out / f"gate-{step}").exists():
                time.sleep(0.01)
            run.step(loss=loss)
            model.follow()
            average.update(model)
            stopping["steps"] += 1
        own = slice(run.rank, None, run.world_size)
        errors = ((model(paddle.to_tensor(held_out[0][own])).numpy() - held_out[1][own]) ** 2).reshape(-1)
        error = run.mean(errors.sum()) / run.mean(len(errors))
        stopping["errors"].append(error)
        is_better = error < 0.98 * stopping["best"]
        stopping["best"] = error if is_better else stopping["best"]
        stopping["misses"] = 0 if is_better else stopping["misses"] + 1
        if stopping["misses"] == MOST_MISSES:
            run.finish()
    kept = {f"average {name}": value for name, value in average.weights.items()}
    np.savez(out / f"ended-{os.getpid()}.npz", **kept, **arrays_of(model))
    summary = {**stopping, "updates": average.updates, "step": run.step_number, "epoch": run.epoch}
    (out / f"ended-{os.getpid()}.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
