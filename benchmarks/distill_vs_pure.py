"""How many steps a second a student makes with distillation, compared with the same student without.

    python benchmarks/distill_vs_pure.py --case asleep --json
    python benchmarks/distill_vs_pure.py --case busy --epochs 1 --steps 96

The shape is that of EDL's published table: batches of 32 images of 3x224x224 float32, teachers asked for 16 at a time.

| case | a student's step | teachers |
| --- | --- | --- |
| asleep | 168 ms, in which it leaves its core to others, as a student on a GPU does | five, 300 ms an answer |
| busy | as much work as takes 168 ms alone on one core: multiplying matrices | five, 300 ms an answer |
| quick | 40 ms, asleep | two that answer at once |

Both train the same number of epochs from the same source; the reader knows how many. What it takes to connect and to
wait for the first batch counts. With `--json` the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a busy student has one core

import numpy as np
from _data import DATA
from _flags import at_least_1
from _measuring import instant_teachers, measured

from edl_runtime.distill import DistillReader, Fixed
from edl_runtime.settings import RuntimeSettings

BATCH_SIZE = 32
TEACHER_BATCH_SIZE = 16
MATRIX = np.ones((256, 256), np.float32)
CALIBRATIONS = 5

Step = Callable[[], None]


class Case(NamedTuple):
    """A student and its teachers."""

    step_s: float
    busy: bool
    teachers: int
    answer_ms: float


CASES = {
    "asleep": Case(step_s=0.168, busy=False, teachers=5, answer_ms=300),
    "busy": Case(step_s=0.168, busy=True, teachers=5, answer_ms=300),
    "quick": Case(step_s=0.040, busy=False, teachers=2, answer_ms=0),
}


def step_of(case: Case) -> Step:
    """Return a student's step."""
    if not case.busy:
        return lambda: time.sleep(case.step_s)
    times = round(case.step_s / min(seconds_of(lambda: multiply(20)) / 20 for _ in range(CALIBRATIONS)))
    return lambda: multiply(times)


def multiply(times: int) -> None:
    for _ in range(times):
        MATRIX @ MATRIX  # without the GIL, as in training frameworks


def seconds_of(work: Step) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def train(epochs: int, batches: Callable[[], Iterable[Any]], step: Step) -> None:
    for _ in range(epochs):
        for _ in batches():
            step()


def benchmark(case: Case, epochs: int, steps: int) -> dict[str, int | float]:
    """Return the measurements, with the unit in each name."""
    data = DATA["img224"]
    source = data.source("batch", steps, BATCH_SIZE)
    step = step_of(case)
    with instant_teachers(case.teachers, data.signature, case.answer_ms) as teachers:
        pure = measured(lambda: train(epochs, source, step), teachers)
        with DistillReader(
            source,
            inputs=data.names,
            outputs=["logits"],
            teachers=Fixed(tuple(teacher.address for teacher in teachers)),
            teacher_batch_size=TEACHER_BATCH_SIZE,
            epochs=epochs,
            settings=RuntimeSettings(),
        ) as reader:
            distilled = measured(lambda: train(epochs, lambda: reader, step), teachers)
            waited_s = reader.stats().waited_s
    count = epochs * steps

    def ms_a_step(seconds: float) -> float:
        return round(1000 * seconds / count, 2)

    return {
        "epochs": epochs,
        "steps_an_epoch": steps,
        "teachers": case.teachers,
        "pure_steps_per_s": round(count / pure.wall_s, 3),
        "distilled_steps_per_s": round(count / distilled.wall_s, 3),
        "ratio": round(pure.wall_s / distilled.wall_s, 4),
        "waited_ms_per_step": ms_a_step(waited_s),
        "pure_cpu_ms_per_step": ms_a_step(pure.cpu_s),
        "student_cpu_ms_per_step": ms_a_step(distilled.cpu_s),
        "teachers_cpu_ms_per_step": ms_a_step(distilled.others_cpu_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="asleep")
    parser.add_argument("--epochs", type=at_least_1, default=12)
    parser.add_argument("--steps", type=at_least_1, default=8, help="in an epoch")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    options = parser.parse_args()
    found = {"case": options.case, **benchmark(CASES[options.case], options.epochs, options.steps)}
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:28} {value:>14}")


if __name__ == "__main__":
    main()
