"""A training script with options in its environment; it logs the samples of its steps."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from edl_runtime import elastic

OPTIONS: dict[str, Any] = {
    "samples": 150,
    "global_batch": 64,
    "epochs": 2,
    "micro_batch": None,
    "num_workers": 0,
    "step_s": 0.0,  # time of each batch, until there is a file "quickly"
    "gates": [],  # steps that wait for the test, and "load" and "save": reading and writing a checkpoint
    "hidden": 8,
    "leave_at": {},  # rank: step
    "finish_at": math.inf,  # step
    "shards": 0,  # of 20 samples each, in place of a dataset
    "shard_batch": 8,
    "reader": False,  # whether teachers answer
    "save_s": 0.0,  # time of a checkpoint
    "piece_s": 0.0,  # time of each chunk of a state transfer and of each answer of the store
    "stuck_after": None,  # own steps after which the first trainer hangs
    "nan_at": math.inf,  # step from which on rank 0's loss is NaN
    **json.loads(os.environ.get("SCRIPT_OPTIONS", "{}")),
}


class Samples(paddle.io.Dataset):  # type: ignore[misc]
    """Numbered samples."""

    def __init__(self, count: int) -> None:
        super().__init__()
        draws = np.random.default_rng(0)
        self.inputs = draws.normal(size=(count, 4)).astype("float32")
        self.labels = (self.inputs @ draws.normal(size=(4, 1))).astype("float32")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.inputs[index], self.labels[index], np.int64(index)


def build() -> tuple[Any, Any]:
    """Return a small model and its optimizer."""
    paddle.seed(1)
    hidden = OPTIONS["hidden"]
    model = paddle.nn.Sequential(
        paddle.nn.Linear(4, hidden),
        paddle.nn.Tanh(),
        paddle.nn.Linear(hidden, 1),
    )
    schedule = paddle.optimizer.lr.ExponentialDecay(0.02, 0.97)
    return model, paddle.optimizer.Adam(schedule, parameters=model.parameters())


@contextlib.contextmanager
def teaching(data: Any) -> Iterator[Any]:
    """Yield the batches, through a reader if there are teachers."""
    if not OPTIONS["reader"]:
        yield data
        return
    sys.path.append(str(Path(__file__).parents[3]))
    from support.teachers.fakes import FakeTeachers, arithmetic

    from edl_runtime.distill import DistillReader, Fixed

    teachers = FakeTeachers({"a:1": arithmetic, "b:1": arithmetic})
    with DistillReader(
        data.local,
        inputs=["x", None, None],
        outputs=["sum"],
        teachers=Fixed(("a:1", "b:1")),
        teacher_batch_size=8,
        connect=teachers.connect,
    ) as reader:
        yield (
            (paddle.to_tensor(x), paddle.to_tensor(labels), numbers)
            for x, labels, numbers, _ in checked(data.through(reader))
        )


def checked(batches: Iterator[Any]) -> Iterator[Any]:
    """Raise AssertionError for an answer that belongs to other inputs."""
    for batch in batches:
        x, _, _, sums = batch
        assert np.allclose(x.sum(axis=1), sums)
        yield batch


def indexed(run: elastic.Run) -> Any:
    """Return batches of a dataset."""
    return run.data(
        Samples(OPTIONS["samples"]),
        global_batch=OPTIONS["global_batch"],
        epochs=OPTIONS["epochs"],
        micro_batch=OPTIONS["micro_batch"],
        num_workers=OPTIONS["num_workers"],
        seed=3,
    )


def sharded(run: elastic.Run) -> Any:
    """Return batches of shards."""
    samples = Samples(20 * OPTIONS["shards"])

    def read(name: str) -> Iterator[Any]:
        first = 20 * int(name)
        for number in range(first, first + 20):
            yield samples[number]

    names = [str(number) for number in range(OPTIONS["shards"])]
    return run.shards(read, names, batch_size=OPTIONS["shard_batch"], epochs=OPTIONS["epochs"], shuffle=True)


def save_slowly() -> None:
    """Take a while to write each checkpoint."""
    from edl_runtime.checkpoint.store import CheckpointStore

    write = CheckpointStore.write

    def slow(*arguments: Any) -> Any:
        time.sleep(OPTIONS["save_s"])
        return write(*arguments)

    CheckpointStore.write = slow  # type: ignore[method-assign]


def move_slowly() -> None:
    """Transfer the state in small chunks, with a delay after each."""
    from edl_runtime.checkpoint import file_format
    from edl_runtime.elastic.comm import process_group
    from edl_runtime.elastic.comm.agent_protocol import SocketAgentClient

    process_group.CHUNK_BYTES = 1 << 13
    file_format.CHUNK_BYTES = process_group.CHUNK_BYTES // 8
    moved = SocketAgentClient.note_progress

    def slow(link: SocketAgentClient) -> None:
        time.sleep(OPTIONS["piece_s"])
        moved(link)

    SocketAgentClient.note_progress = slow  # type: ignore[method-assign]


def slow_down() -> None:
    """Add the delays of the options."""
    for option, slowly in {"save_s": save_slowly, "piece_s": move_slowly}.items():
        if OPTIONS[option]:
            slowly()


def get_stuck(out: Path) -> None:
    """Hang, but only in the first trainer."""
    with contextlib.suppress(FileExistsError):
        (out / "stuck").touch(exist_ok=False)
        while True:
            pass


def load_at_gate(out: Path) -> None:
    """Begin to read a checkpoint, and go on once the test lets it."""
    from edl_runtime.checkpoint.store import CheckpointStore

    load = CheckpointStore.load

    def late(*arguments: Any) -> Any:
        (out / "loads").touch()
        pass_gate(out, "load")
        return load(*arguments)

    CheckpointStore.load = late  # type: ignore[method-assign]


def save_at_gate(out: Path) -> None:
    """Write a checkpoint once the test lets it."""
    from edl_runtime.checkpoint.store import CheckpointStore

    write = CheckpointStore.write

    def late(*arguments: Any) -> Any:
        pass_gate(out, "save")
        return write(*arguments)

    CheckpointStore.write = late  # type: ignore[method-assign]


def pass_gate(out: Path, step: int | str) -> None:
    """Wait until the test opens the step, if it is one of the gates."""
    while step in OPTIONS["gates"] and not (out / f"gate-{step}").exists():
        time.sleep(0.01)


def main(out: Path) -> None:
    """Train, and save the weights in `out`."""
    slow_down()
    load_at_gate(out)
    save_at_gate(out)
    run = elastic.init()
    model, _ = run.wrap(*build())
    data = sharded(run) if OPTIONS["shards"] else indexed(run)
    pending: list[int] = []
    with (out / f"stepped-{os.getpid()}.jsonl").open("a", buffering=1) as log, teaching(data) as batches:
        for own_step, (inputs, labels, numbers) in enumerate(batches):
            loss = ((model(inputs) - labels) ** 2).mean()
            if run.rank == 0 and run.step_number + 1 >= OPTIONS["nan_at"]:
                loss *= math.nan
            loss.backward()
            pending += numbers.tolist()
            if OPTIONS["step_s"] and not (out / "quickly").exists():
                time.sleep(OPTIONS["step_s"])
            pass_gate(out, run.step_number + 1)
            if own_step == OPTIONS["stuck_after"]:
                get_stuck(out)
            before, generation = run.step_number, run.generation
            where = {"rank": run.rank, "generation": generation}
            try:
                run.step(loss=loss)
            finally:
                if run.step_number > before:
                    line = {"step": before + 1, **where, "samples": pending, "loss": run.mean_loss, "at": time.time()}
                    log.write(json.dumps(line) + "\n")
                if run.step_number > before or run.generation > generation:
                    pending = []
            if run.step_number >= OPTIONS["finish_at"]:
                run.finish()
            if run.step_number >= OPTIONS["leave_at"].get(str(run.rank), math.inf):
                break
    run.metrics(final=run.step_number)
    if run.rank == 0:
        weights = {name: value.numpy() for name, value in model.state_dict().items()}
        np.savez(out / "weights.npz", **weights)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
