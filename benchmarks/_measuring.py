"""Other processes of a benchmark, and the CPU use of all."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from edl_runtime.protocol.oip import ModelSignature


class Peer(NamedTuple):
    """Another process that serves at `address`."""

    address: str
    pid: int


class Run(NamedTuple):
    """Seconds of a run, and CPU seconds of this process and of the others."""

    wall_s: float
    cpu_s: float
    others_cpu_s: float


@contextlib.contextmanager
def peers(count: int, script: str, *arguments: str) -> Iterator[list[Peer]]:
    """Run `count` processes of a script in this folder, which print their addresses and end with their input."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.communicate)  # closes its input, which ends it
            processes.append(process)
        yield [Peer(process.stdout.readline().strip(), process.pid) for process in processes if process.stdout]


def instant_teachers(
    count: int, signature: ModelSignature, answer_ms: float = 0
) -> contextlib.AbstractContextManager[list[Peer]]:
    """Run teachers that answer at once, or after `answer_ms` asleep."""
    return peers(count, "_instant_teacher.py", msgspec.json.encode(signature).decode(), str(answer_ms))


def measured(work: Callable[[], None], others: Sequence[Peer]) -> Run:
    """Run `work`; return its times."""
    started = time.perf_counter(), time.process_time(), _cpu_s(others)
    work()
    ended = time.perf_counter(), time.process_time(), _cpu_s(others)
    return Run(*(end - start for start, end in zip(started, ended, strict=True)))


def _cpu_s(others: Sequence[Peer]) -> float:
    """Return the CPU seconds of all threads of these processes, to the nanosecond, unlike `/proc/PID/stat`."""
    tasks = [task for peer in others for task in Path(f"/proc/{peer.pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
