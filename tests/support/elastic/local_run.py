"""A run without an agent, in the test's own process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edl_runtime.elastic.api import Run
from edl_runtime.elastic.comm.agent_protocol import (
    Leave,
    SaveCheckpoint,
    StandaloneClient,
    WorkerMessage,
    encode_message,
)
from edl_runtime.elastic.training.checkpointing import CheckpointManager
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about a compiler cache
    import paddle


Do = Callable[[], object]


class RecordingClient(StandaloneClient):
    """A client that installs no signal handlers and records sent messages."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[WorkerMessage] = []
        self.asked: SaveCheckpoint | None = None

    @property
    def checkpoint_request(self) -> SaveCheckpoint | None:
        return self.asked

    def send(self, message: WorkerMessage) -> None:
        encode_message(message)
        self.sent.append(message)
        super().send(message)

    def handle_signals(self) -> None:
        pass

    def stop(self) -> None:
        self._leave = Leave(reason="the test", checkpoint=True)


def begin(
    folder: Path | None = None, *, every_steps: int = 1000, result: Path | None = None, grace_s: float = 10.0
) -> tuple[Run, RecordingClient]:
    """Return a run in this process and its client, with checkpoints if a folder is given."""
    client = RecordingClient()
    spec = None if folder is None else Checkpoint(url=str(folder), every_steps=every_steps)
    settings = RuntimeSettings(result_file="" if result is None else str(result), grace_s=grace_s)
    return Run(client, CheckpointManager(spec, client), settings), client


def model_and_optimizer(*, width: int = 3, order: int = 1, rate: Any = 0.1) -> tuple[Any, Any]:
    """Return a model of two layers, created in either order, and its optimizer."""
    paddle.seed(7 + order)
    names = ["first", "second"][::order]
    layers = {name: paddle.nn.Linear(2, width) if name == "first" else paddle.nn.Linear(width, 1) for name in names}
    model = paddle.nn.Sequential(("first", layers["first"]), ("second", layers["second"]))
    return model, paddle.optimizer.Adam(rate, parameters=model.parameters())


SAMPLES = [(np.full(2, number, np.float32), np.int64(number)) for number in range(10)]


def train(
    run: Run,
    model: Any,
    data: Any,
    *,
    steps: int | None = None,
    step: bool = True,
    before: Do | None = None,
    between: Do | None = None,
    after: Do | None = None,
) -> list[list[int]]:
    """Do `steps` steps, or all; return the samples of each batch.

    Hooks are called in each step: `before` the forward, `between` it and `run.step`, and `after` that.
    """
    seen: list[list[int]] = []
    for inputs, numbers in data:
        seen.append(np.asarray(numbers).tolist())
        if before:
            before()
        loss = model(inputs.astype(model.parameters()[0].dtype)).astype("float32").mean()
        loss.backward()
        if between:
            between()
        if step:
            run.step(loss=loss)
        if after:
            after()
        if len(seen) == steps:
            break
    return seen


def arrays_of(model: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}
