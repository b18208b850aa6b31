"""What serving a model costs, and what running requests together gains.

    python benchmarks/teacher.py --json

Real `edl teacher` processes serve Paddle models with random weights on the CPU. Each client has two connections, so
that its next request is there when the last is answered; all clients are threads of one process. Measured are

- `serving`: samples a second of a teacher of ResNet18 (32x32 images, 16 rows a request) over those of the bare
  predictor with as many rows, with one client and with eight. The teacher may join requests; with `--max-batch 1` it
  may not.
- `batching`: LeNet with eight clients of four rows each: samples a second with requests joined over those without.

What is compared takes turns, and the medians count. The CPU of a request is that of the teacher's two processes, and
of the clients. With `--json` the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from _flags import at_least_1
from _measuring import Peer, measured

from edl_runtime.protocol.client import TeacherConnection

CONNECTIONS = 2
WARM_UP_S = 2.0

Figures = dict[str, float]


class Turn(NamedTuple):
    """Requests of a turn, its seconds, and CPU seconds of the clients and of the server."""

    requests: int
    wall_s: float
    clients_cpu_s: float
    cpu_s: float


class Case(NamedTuple):
    """A model and its clients."""

    model: str
    shape: tuple[int, ...]
    rows: int
    clients: int

    @property
    def name(self) -> str:
        return f"{self.model}_{self.clients}_clients_of_{self.rows}_rows"


SERVING = [Case("resnet18", (3, 32, 32), 16, clients) for clients in (1, 8)]
BATCHING = Case("lenet", (1, 28, 28), 4, 8)


class Server:
    """A teacher of one model, and clients that keep it busy."""

    def __init__(self, address: str, processes: list[Peer], case: Case) -> None:
        self._address = address
        self._processes = processes
        self._case = case

    def turn(self, seconds: float) -> Turn:
        """Send requests for `seconds`."""
        done = []
        run = measured(lambda: done.append(self._ask(time.perf_counter() + seconds)), self._processes)
        return Turn(done[0], run.wall_s, run.cpu_s, run.others_cpu_s)

    def _ask(self, until_s: float) -> int:
        counts: list[int] = []
        clients = [
            threading.Thread(target=self._client, args=(until_s, counts))
            for _ in range(self._case.clients * CONNECTIONS)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        if len(counts) < len(clients):
            raise SystemExit("a client failed")
        return sum(counts)

    def _client(self, until_s: float, counts: list[int]) -> None:
        image = np.zeros((self._case.rows, *self._case.shape), np.float32)
        count = 0
        with TeacherConnection(self._address) as teacher:
            while time.perf_counter() < until_s:
                (answer,) = teacher.infer({"image": image}, []).values()
                if answer.shape != (self._case.rows, 10):
                    raise SystemExit(f"got an answer of shape {answer.shape}")
                count += 1
        counts.append(count)


@contextlib.contextmanager
def served(models: Path, case: Case, max_batch: int) -> Iterator[Server]:
    """Serve the model of `case`."""
    command = [sys.executable, "-m", "edl_runtime.cli", "teacher", "--json"]
    command += ["--model", str(models / case.model), "--max-batch", str(max_batch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or not (line := process.stdout.readline()):
                raise SystemExit("the teacher did not start")
            address = json.loads(line)["address"]
            family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children())]
            yield Server(address, [Peer(address, pid) for pid in family], case)
        finally:
            process.terminate()


@contextlib.contextmanager
def bare(models: Path, case: Case) -> Iterator[Callable[[float], Turn]]:
    """Load the model of `case` into a process without a server; yield a function that runs it for some seconds."""
    command = [sys.executable, str(Path(__file__).with_name("_bare_predictor.py")), str(models / case.model)]
    with subprocess.Popen(
        [*command, str(case.rows)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        if process.stdin is None or process.stdout is None or process.stdout.readline() != "ready\n":
            raise SystemExit("the bare predictor did not start")
        stdin, stdout = process.stdin, process.stdout

        def turn(seconds: float) -> Turn:
            print(seconds, file=stdin, flush=True)
            runs, wall_s, cpu_s = stdout.readline().split()
            return Turn(int(runs), float(wall_s), 0.0, float(cpu_s))

        yield turn


def compared(
    case: Case, one: Callable[[float], Turn], other: Callable[[float], Turn], options: argparse.Namespace
) -> tuple[Figures, Figures, float]:
    """Run both in turns; return the figures of each, and the median ratio of their rates."""
    for turn in (one, other):
        turn(WARM_UP_S)
    turns = [(one(options.seconds), other(options.seconds)) for _ in range(options.rounds)]
    ones, others = zip(*turns, strict=True)
    ratio = statistics.median((a.requests / a.wall_s) / (b.requests / b.wall_s) for a, b in turns)
    return figures(case, ones), figures(case, others), round(ratio, 3)


def figures(case: Case, turns: tuple[Turn, ...]) -> Figures:
    def median(figure: Callable[[Turn], float]) -> float:
        return round(statistics.median(map(figure, turns)), 3)

    return {
        "samples_per_s": median(lambda turn: case.rows * turn.requests / turn.wall_s),
        "clients_cpu_ms_per_request": median(lambda turn: 1000 * turn.clients_cpu_s / turn.requests),
        "cpu_ms_per_request": median(lambda turn: 1000 * turn.cpu_s / turn.requests),
    }


def benchmark(options: argparse.Namespace) -> dict[str, float]:
    """Return the measurements, with the unit in each name."""
    found: dict[str, float] = {}

    def add(case: Case, **figures_of: Figures) -> None:
        found.update(
            {f"{case.name}.{part}.{name}": value for part, of in figures_of.items() for name, value in of.items()}
        )

    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        saving = [sys.executable, str(Path(__file__).with_name("_save_models.py")), folder]
        subprocess.run(saving, check=True, capture_output=True)
        for case in SERVING:
            with bare(models, case) as alone, served(models, case, options.max_batch) as server:
                teacher, predictor, ratio = compared(case, server.turn, alone, options)
            add(case, teacher=teacher, bare=predictor)
            found[f"{case.name}.serving_ratio"] = ratio
        with served(models, BATCHING, options.max_batch) as joins, served(models, BATCHING, 1) as does_not:
            joined, single, ratio = compared(BATCHING, joins.turn, does_not.turn, options)
        add(BATCHING, joined=joined, single=single)
        found[f"{BATCHING.name}.batching_ratio"] = ratio
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-batch", type=at_least_1, default=64, help="most rows of a joined run")
    parser.add_argument("--seconds", type=at_least_1, default=3, help="of each turn")
    parser.add_argument("--rounds", type=at_least_1, default=5, help="turns of each")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    options = parser.parse_args()
    result = benchmark(options)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:70} {value:>14,}")


if __name__ == "__main__":
    main()
