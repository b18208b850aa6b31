"""How fast a student gets its batches with teachers' answers in them, compared with the bare source.

    python benchmarks/distill_reader.py --data img224 --format batch --json

Teachers are processes of their own on real sockets that answer at once. Plain iteration of the same source and
distilled epochs take turns, and the medians count. With `--json` the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from _data import DATA

from edl_runtime.distill import DistillReader, Fixed
from edl_runtime.settings import RuntimeSettings

ROUNDS = 3


class Run(NamedTuple):
    """What one pass over the data took."""

    wall_s: float
    student_cpu_s: float
    teacher_cpu_s: float


@contextlib.contextmanager
def teachers(count: int, data: str) -> Iterator[list[tuple[str, int]]]:
    """Run so many instant teachers; yields their addresses and pids."""
    command = [sys.executable, str(Path(__file__).with_name("_instant_teacher.py")), data]
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.communicate)  # closes its input, which ends it
            processes.append(process)
        yield [(process.stdout.readline().strip(), process.pid) for process in processes if process.stdout]


def measured(batches: Iterable[Any], pids: list[int]) -> Run:
    """Return what it takes to consume all batches; `pids` are those of the teachers."""
    started = time.perf_counter(), time.process_time(), cpu_s(pids)
    for _ in batches:
        pass
    ended = time.perf_counter(), time.process_time(), cpu_s(pids)
    return Run(*(end - start for start, end in zip(started, ended, strict=True)))


def cpu_s(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(one.user + one.system for one in times)


def benchmark(options: argparse.Namespace) -> dict[str, str | int | float]:
    """Return what was measured, with the unit in each name."""
    batches = options.batches or DATA[options.data].batches
    plain, distilled = zip(*rounds(options, batches), strict=True)
    samples = batches * options.batch_size
    rate = samples / statistics.median(run.wall_s for run in distilled)
    plain_rate = samples / statistics.median(run.wall_s for run in plain)

    def ms_a_batch(seconds: Iterable[float]) -> float:
        return round(1000 * statistics.median(seconds) / batches, 3)

    return {
        "data": options.data,
        "format": options.format,
        "batch_size_samples": options.batch_size,
        "teacher_batch_size_samples": options.teacher_batch_size,
        "teachers": options.teachers,
        "batches": batches,
        "samples_per_s": round(rate, 1),
        "plain_samples_per_s": round(plain_rate, 1),
        "ratio": round(rate / plain_rate, 4),
        "student_cpu_ms_per_batch": ms_a_batch(run.student_cpu_s for run in distilled),
        "plain_cpu_ms_per_batch": ms_a_batch(run.student_cpu_s for run in plain),
        "teachers_cpu_ms_per_batch": ms_a_batch(run.teacher_cpu_s for run in distilled),
    }


def rounds(options: argparse.Namespace, batches: int) -> list[tuple[Run, Run]]:
    """Return what the bare source and a distilled epoch of it took, one after the other, in each round."""
    data = DATA[options.data]
    source = data.source(options.format, batches, options.batch_size)
    with teachers(options.teachers, options.data) as running:
        pids = [pid for _, pid in running]
        reader = DistillReader(
            source,
            inputs=data.names,
            outputs=["logits"],
            format=options.format,
            teachers=Fixed(tuple(address for address, _ in running)),
            teacher_batch_size=options.teacher_batch_size,
            settings=RuntimeSettings(),
        )
        with reader:
            for item in reader:  # connects, and says at once when something is wrong
                slots = item if options.format != "sample_list" else item[0]
                if len(slots) != len(data.names) + 1:
                    raise SystemExit(f"got {len(slots)} slots")
                break
            return [(measured(source(), pids), measured(reader, pids)) for _ in range(ROUNDS)]


def at_least_1(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed is 1 or more")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=DATA, default="img224")
    parser.add_argument("--format", choices=["sample", "sample_list", "batch"], default="batch")
    parser.add_argument("--batch-size", type=at_least_1, default=32)
    parser.add_argument("--teacher-batch-size", type=at_least_1, default=16)
    parser.add_argument("--teachers", type=at_least_1, default=2)
    parser.add_argument(
        "--batches", type=at_least_1, help="in each pass over the data; by default enough for some seconds"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    options = parser.parse_args()
    result = benchmark(options)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:28} {value:>14,}" if isinstance(value, int | float) else f"{name:28} {value:>14}")


if __name__ == "__main__":
    main()
