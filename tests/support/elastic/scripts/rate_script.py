"""A training script that sets its learning rate by itself; it logs the rate of each step."""

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
    "how": "number",  # or "scheduler", or "local": by the loss of the rank's own samples
    "schedule": None,  # when `run.step` steps the scheduler; None: the script does
    "batch": {"global_batch": 8},
    "decay": 0.9,  # what it multiplies the rate by before each step
    "after": 1.0,  # and after it, if it is a number
    "epochs": 12,
    "gates": [],  # steps that wait for the test
    **json.loads(os.environ.get("SCRIPT_OPTIONS", "{}")),
}


def main(out: Path) -> None:
    """Change the rate in each step, and save the weights in `out`."""
    draws = np.random.default_rng(0)
    inputs = draws.normal(size=(24, 4)).astype("float32")
    labels = (inputs @ draws.normal(size=(4, 1))).astype("float32")
    how = OPTIONS["how"]
    run = elastic.init()
    paddle.seed(1)
    model = paddle.nn.Linear(4, 1)
    scheduler = paddle.optimizer.lr.ExponentialDecay(0.1, OPTIONS["decay"])
    optimizer = paddle.optimizer.Momentum(
        scheduler if how == "scheduler" else 0.1,
        parameters=model.parameters(),
        grad_clip=paddle.nn.ClipGradByGlobalNorm(0.5),
    )
    run.wrap(model, optimizer, schedule=OPTIONS["schedule"])
    with (out / f"rates-{os.getpid()}.jsonl").open("a", buffering=1) as log:
        for x, y in run.data(list(zip(inputs, labels, strict=True)), epochs=OPTIONS["epochs"], **OPTIONS["batch"]):
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            if how == "scheduler" and OPTIONS["schedule"] is None:
                scheduler.step()
            elif how != "scheduler":
                optimizer.set_lr(float(loss) / 10 if how == "local" else optimizer.get_lr() * OPTIONS["decay"])
            before = run.step_number
            while before + 1 in OPTIONS["gates"] and not (out / f"gate-{before + 1}").exists():
                time.sleep(0.01)
            try:
                run.step(loss=loss)
            finally:
                if run.step_number > before:
                    log.write(json.dumps({"step": before + 1, "rate": optimizer.get_lr()}) + "\n")
            if how == "number":
                optimizer.set_lr(optimizer.get_lr() * OPTIONS["after"])
    np.savez(out / f"weights-{os.getpid()}.npz", **{name: value.numpy() for name, value in model.state_dict().items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
