"""A training script of two models, each with its optimizer, that are trained against each other."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from edl_runtime import elastic

OPTIONS: dict[str, Any] = {
    "at_once": False,  # whether both models step together, or one after the other, in the usual loop
    "generator_first": False,  # what the critic is then trained on is of the generator before its step
    "every": 1,  # in which batches the generator is trained
    "norm": False,  # whether the critic has a BatchNorm layer
    "samples": 40,
    "epochs": 6,
    "gates": [],  # steps that wait for the test: 4 or, after a batch's first step, "4-second"
    "root_dies": [],  # in which step rank 0 dies, and after how many messages to the last rank
    **json.loads(os.environ.get("SCRIPT_OPTIONS", "{}")),
}


class DyingSocket:
    """A connection that ends its process instead of sending a certain message."""

    def __init__(self, end: socket.socket, sends: int) -> None:
        self._end = end
        self._left = sends

    def sendall(self, data: bytes) -> None:
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        self._end.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)


def wait_at(out: Path, run: Any, step: str) -> None:
    """Tell the test that this step comes now; wait for it, or die in the step, if the options say so."""
    (out / f"at-{step}-{os.getpid()}").touch()
    while step in map(str, OPTIONS["gates"]) and not (out / f"gate-{step}").exists():
        time.sleep(0.01)
    if [step, run.rank, run.world_size] == [*OPTIONS["root_dies"][:1], 0, 3]:
        ends = run._session.group._control._ends
        ends[max(ends)] = DyingSocket(ends[max(ends)], OPTIONS["root_dies"][1])


def main(out: Path) -> None:
    """Train both, and save them in `out`."""
    draws = np.random.default_rng(0)
    real = draws.normal(2.0, 0.5, size=(OPTIONS["samples"], 2)).astype("float32")
    noise = draws.normal(size=(OPTIONS["samples"], 3)).astype("float32")
    run = elastic.init()
    paddle.seed(1)
    generator = paddle.nn.Linear(3, 2)
    norm = [paddle.nn.BatchNorm1D(4)] if OPTIONS["norm"] else []
    critic = paddle.nn.Sequential(paddle.nn.Linear(2, 4), *norm, paddle.nn.Tanh(), paddle.nn.Linear(4, 1))
    decay = paddle.optimizer.lr.ExponentialDecay(0.05, 0.95)
    kept = run.register("kept", {"updates": 0, "average": 0.0})
    (generator, _), (critic, critic_optimizer) = run.wrap(
        (generator, paddle.optimizer.Adam(decay, parameters=generator.parameters())),
        (critic, paddle.optimizer.Momentum(0.02, parameters=critic.parameters())),
    )

    def train_generator(made: Any, of: Any) -> None:
        loss = -critic(made).mean()
        loss.backward()
        run.step(loss, of=of)

    def train_critic(made: Any, x: Any, of: Any) -> None:
        loss = critic(made.detach()).mean() - critic(x).mean()
        loss.backward()
        run.step(loss, of=of)

    dataset = list(zip(real, noise, strict=True))
    for x, z in run.data(dataset, global_batch=8, epochs=OPTIONS["epochs"]):
        made, step = generator(z), str(run.step_number + 1)
        wait_at(out, run, step)
        if OPTIONS["at_once"]:
            (-critic(made).mean()).backward()
            critic_optimizer.clear_grad()  # gradients of the generator's loss
            train_critic(made, x, None)
        elif run.step_number % OPTIONS["every"] != OPTIONS["every"] - 1:
            train_critic(made, x, critic)
        elif OPTIONS["generator_first"]:
            train_generator(made, generator)
            wait_at(out, run, f"{step}-second")
            train_critic(made, x, critic)
        else:
            train_critic(made, x, critic)
            wait_at(out, run, f"{step}-second")
            train_generator(made, generator)
        kept["updates"] += 1
        kept["average"] += 0.1 * (float(generator.weight.sum()) - kept["average"])
    models = {"generator": generator, "critic": critic}
    values = {
        f"{word} {name}": each.numpy() for word, model in models.items() for name, each in model.named_parameters()
    }
    np.savez(out / f"ended-{os.getpid()}.npz", **values)
    summary = {"step": run.step_number, "rates": [run.learning_rate, critic_optimizer.get_lr()], **kept}
    (out / f"ended-{os.getpid()}.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
