"""What checkpoints cost a training: how long its loop stands still, and how far its steps slow down.

    python benchmarks/checkpoint.py --json

A loop of steps with a state of Paddle tensors, and a checkpoint each so many steps. Steps are asleep (as if a GPU
computed) or multiply matrices on the CPU; checkpoints are written in the background, as this project does it, or
before the loop goes on: by this project, by `safetensors` and by `paddle.save`. "blocked" is the share of the loop's
time in which it did nothing but save, "blocked_cpu" what all of this process's threads used of the processors
meanwhile, which tells more where others compute, too. "slower" is by how much longer steps took that ran while a
checkpoint was written than those of the same loop that did not, and what that makes over all steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from _flags import at_least_1

from edl_runtime.checkpoint.background_writer import CheckpointWriter
from edl_runtime.checkpoint.file_format import Arrays, Snapshot
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.specs import Checkpoint

TENSORS = 60

Save = Callable[[int], object]
"""Saves after a step; returns False if the checkpoint was skipped."""


def state(megabytes: float) -> dict[str, dict[str, Any]]:
    """Return tensors of a model and, twice as many, of its optimizer."""
    import paddle

    size = int(megabytes * 1e6 / 4 / TENSORS)
    tensors = {f"tensor_{number}": paddle.randn([size]) for number in range(TENSORS)}
    names = list(tensors)
    return {
        "model": {name: tensors[name] for name in names[: TENSORS // 3]},
        "optimizer": {name: tensors[name] for name in names[TENSORS // 3 :]},
    }


def views(tensors: dict[str, dict[str, Any]]) -> Arrays:
    """Return the same memory as numpy arrays; `Tensor.numpy()` would copy."""
    return {
        group: {name: np.from_dlpack(tensor.detach()) for name, tensor in some.items()}
        for group, some in tensors.items()
    }


def asleep(step_s: float) -> Callable[[], None]:
    """Return a step that uses no CPU."""
    return lambda: time.sleep(step_s)


def computing(step_s: float) -> Callable[[], None]:
    """Return a step of matrix products on all processors, which takes about `step_s` on an idle machine."""
    import paddle

    matrix = paddle.randn([512, 512])

    def step(products: int) -> None:
        product = matrix
        for _ in range(products):
            product = (matrix @ product).tanh()
        float(product.sum())

    step(20)
    began = time.perf_counter()
    step(100)
    products = max(1, round(step_s * 100 / (time.perf_counter() - began)))
    return lambda: step(products)


def run(step: Callable[[], None], save: Save, writing: Callable[[], bool], steps: int, every: int) -> dict[str, Any]:
    """Do `steps` steps with a checkpoint after each `every`; return the times."""
    alone_s: list[float] = []
    beside_s: list[float] = []
    blocked_s: list[float] = []
    blocked_cpu_s: list[float] = []
    left_out = 0
    began = time.perf_counter()
    for number in range(1, steps + 1):
        beside = writing()
        at = time.perf_counter()
        step()
        (beside_s if beside else alone_s).append(time.perf_counter() - at)
        if number % every == 0:
            at, cpu_at = time.perf_counter(), time.process_time()
            left_out += save(number) is False
            blocked_s.append(time.perf_counter() - at)
            blocked_cpu_s.append(time.process_time() - cpu_at)
    found: dict[str, Any] = {
        "blocked_percent": round(100 * sum(blocked_s) / (time.perf_counter() - began), 4),
        "blocked_ms": round(1000 * statistics.fmean(blocked_s), 1),
        "blocked_cpu_ms": round(1000 * statistics.fmean(blocked_cpu_s), 1),
        "left_out": left_out,
    }
    if alone_s and beside_s:
        slower = statistics.fmean(beside_s) / statistics.fmean(alone_s) - 1
        found["slower_while_writing_percent"] = round(100 * slower, 1)
        found["slower_percent"] = round(100 * slower * len(beside_s) / steps, 2)
    return found


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure each way to save with each kind of step."""
    import paddle
    from safetensors.numpy import save_file

    tensors = state(options.megabytes)

    def capture(step: int) -> Snapshot:
        return Snapshot(generation=1, step=step, arrays=views(tensors), extra={"position": step})

    def by_safetensors(_: int) -> None:
        for group, arrays in views(tensors).items():
            save_file(dict(arrays), folder / f"{group}.safetensors")

    def by_paddle(_: int) -> None:
        for group, some in tensors.items():
            paddle.save(some, str(folder / f"{group}.pdparams"))

    took_s: list[float] = []
    store = CheckpointStore(Checkpoint(url=options.url or str(folder / "kept"), keep_last=2))
    writer = CheckpointWriter(store, saved=lambda _, seconds: took_s.append(seconds))
    writer.prepare(capture(0).arrays)
    ways: dict[str, Save] = {
        "background": lambda step: writer.save(lambda: capture(step)),
        "at once": lambda step: store.write(capture(step)) and store.prune(),
        "safetensors": by_safetensors,
        "paddle.save": by_paddle,
    }
    found: dict[str, Any] = {"megabytes": options.megabytes, "every": options.every, "step_ms": options.step_ms}
    for kind, make in (("asleep", asleep), ("computing", computing)):
        step = make(options.step_ms / 1000)
        found[kind] = {}
        for way, save in ways.items():
            steps = options.every * (options.checkpoints if way == "background" else 1)
            if way == "background":
                save(0)  # so that a checkpoint is written after the first step as after later ones
            found[kind][way] = run(step, save, lambda: not writer.wait(0), steps, options.every)
            writer.wait()
        found[kind]["background"]["written_in_s"] = round(statistics.fmean(took_s), 4)
        took_s.clear()
    writer.close()
    return found


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=at_least_1, default=300)
    parser.add_argument("--every", type=at_least_1, default=50, help="steps between checkpoints")
    parser.add_argument("--step-ms", type=at_least_1, default=200)
    parser.add_argument("--checkpoints", type=at_least_1, default=3, help="how many to write in the background")
    parser.add_argument("--url", default="", help="where to keep them; a temporary folder unless given")
    parser.add_argument("--quick", action="store_true", help="a small state and short steps: does it run?")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    options = parser.parse_args()
    if options.quick:
        options.megabytes, options.every, options.step_ms, options.checkpoints = 1, 20, 10, 2
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))
    with tempfile.TemporaryDirectory(prefix="edl-checkpoint-") as folder:
        found = measure(options, Path(folder))
    if options.json:
        print(json.dumps(found))
        return
    for kind in ("asleep", "computing"):
        print(f"{options.megabytes} MB each {options.every} steps of {options.step_ms} ms, {kind}:")
        for way, result in found[kind].items():
            print(f"  {way:12}", "  ".join(f"{name}={value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
