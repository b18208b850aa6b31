"""A training script with BatchNorm, whose ranks see batches of different scale; it logs its running statistics."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from edl_runtime import elastic

OPTIONS: dict[str, Any] = {
    "steps": 12,
    "epochs": 1,
    "gates": [],  # steps that wait for the test
    "norm": "BatchNorm1D",
    "finish_at": 0,  # step after which ranks with a batch end the training
    "rest": 0,  # samples of a last step
    "dies_at": 0,  # step in which rank 1 is killed while statistics are averaged
    **json.loads(os.environ.get("SCRIPT_OPTIONS", "{}")),
}


def statistics_of(model: Any) -> list[list[float]]:
    return [value.numpy().tolist() for name, value in model.state_dict().items() if name.split(".")[-1][0] == "_"]


def die(run: elastic.Run) -> None:
    """Have this process killed where it averages its statistics."""
    from edl_runtime.elastic.training.batch_norm import RunningStatistics

    average = RunningStatistics.average

    def dying(*arguments: Any) -> None:
        if (run.rank, run.step_number + 1) == (1, OPTIONS["dies_at"]):
            os.kill(os.getpid(), signal.SIGKILL)
        average(*arguments)

    RunningStatistics.average = dying  # type: ignore[method-assign]


def main(out: Path) -> None:
    """Train, and log the statistics before and after each `run.step`."""
    warnings.simplefilter("ignore")
    inputs = np.random.default_rng(0).normal(size=(8 * OPTIONS["steps"] + OPTIONS["rest"], 4)).astype("float32")
    run = elastic.init()
    die(run)
    paddle.seed(1)
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 3), getattr(paddle.nn, OPTIONS["norm"])(3), paddle.nn.Linear(3, 1))
    run.wrap(model, paddle.optimizer.SGD(0.01, parameters=model.parameters()))
    with (out / f"statistics-{os.getpid()}.jsonl").open("a", buffering=1) as log:
        for (x,) in run.data([(each,) for each in inputs], global_batch=8, epochs=OPTIONS["epochs"]):
            loss = model(x * (1 + run.rank) + run.rank).mean()
            loss.backward()
            step, rank = run.step_number + 1, run.rank
            (out / f"at-{step}-{os.getpid()}").touch()
            while step in OPTIONS["gates"] and not (out / f"gate-{step}").exists():
                time.sleep(0.01)
            before = statistics_of(model)
            if run.step(loss=loss):
                log.write(
                    json.dumps({"step": step, "rank": rank, "before": before, "after": statistics_of(model)}) + "\n"
                )
            if run.step_number == OPTIONS["finish_at"]:
                run.finish()
        log.write(json.dumps({"step": "end", "rank": rank, "before": before, "after": statistics_of(model)}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
