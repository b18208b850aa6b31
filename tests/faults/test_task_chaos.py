"""Readers of one data set under seeded faults: killed, suspended, too slow, and with a Redis that is killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.depth import examples
from support.paths import TESTS
from support.tasks import consumer
from support.tasks.durable_redis import DurableRedis
from support.teachers.process import wait_until

from edl_runtime.shards.tasks import BlockingTaskQueue

SHARDS, LINES, PASSES, CONSUMERS = 40, 4, 2, 3
TASKS = SHARDS // consumer.SHARDS_PER_TASK
RECORDS = [f"{shard}-{line}" for shard in range(SHARDS) for line in range(LINES)]
HANGS_AFTER_S = 240


class Consumers:
    """Processes that read the same tasks; what they save is in `out`."""

    def __init__(self, folder: Path, redis_url: str, kind: str) -> None:
        self.out = folder / "out"
        self.out.mkdir()
        self._data = folder / "data"
        self._data.mkdir()
        for shard in range(SHARDS):
            content = "".join(f"{shard}-{line}\n" for line in range(LINES))
            (self._data / f"{shard:03}").write_text(content)
        self._command = [sys.executable, "-m", "support.tasks.consumer", kind, str(self._data), str(self.out)]
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
        self._env["EDL_REDIS_URL"] = redis_url
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start one more."""
        with (self.out / "log").open("ab") as log:
            self._running.append(
                subprocess.Popen([*self._command, str(PASSES)], cwd=TESTS, env=self._env, stdout=log, stderr=log)
            )

    def one_of(self, draw: random.Random) -> subprocess.Popen[bytes]:
        return draw.choice(self._running)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill it, and start another."""
        process.kill()
        process.wait()
        self._running.remove(process)
        self.start()

    def saved(self) -> int:
        """Return of how many tasks something was saved."""
        return sum(1 for path in self.out.iterdir() if path.name[0].isdecimal())

    def await_end(self) -> None:
        """Wait until all have read all passes."""
        for process in self._running:
            assert process.wait(HANGS_AFTER_S) == 0, (self.out / "log").read_text()[-3000:]

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


@contextlib.contextmanager
def running_consumers(folder: Path, redis_url: str, kind: str) -> Iterator[Consumers]:
    """Start some; none is left."""
    consumers = Consumers(folder, redis_url, kind)
    try:
        for _ in range(CONSUMERS):
            consumers.start()
        yield consumers
    finally:
        consumers.close()


def hurt(fault: str, consumers: Consumers, server: DurableRedis, queue: BlockingTaskQueue, draw: random.Random) -> None:
    """Do it, and undo what would keep the rest from going on."""
    victim = consumers.one_of(draw)
    match fault:
        case "kill a reader":
            consumers.kill(victim)
        case "kill Redis":
            server.kill()
            server.start()
        case "kill Redis, and a reader meanwhile":
            server.kill()
            consumers.kill(victim)
            server.start()
        case "suspend a reader until others have its tasks":
            os.kill(victim.pid, signal.SIGSTOP)
            until_taken_away(queue, victim.pid)
            os.kill(victim.pid, signal.SIGCONT)
        case "kill a suspended reader":
            os.kill(victim.pid, signal.SIGSTOP)
            until_taken_away(queue, victim.pid)
            consumers.kill(victim)


FAULTS = [
    "kill a reader",
    "kill Redis",
    "kill Redis, and a reader meanwhile",
    "suspend a reader until others have its tasks",
    "kill a suspended reader",
]


def until_taken_away(queue: BlockingTaskQueue, pid: int) -> None:
    wait_until(lambda: not any(task.worker.endswith(f"-{pid}") for task in queue.report().pending))


def lost_and_doubled(out: Path, pass_number: int) -> tuple[list[str], list[str]]:
    """Return the records that nobody saved in this pass, and those that were saved more than once."""
    files = [path for path in out.iterdir() if path.name.startswith(f"{pass_number}-")]
    counts = Counter(record for path in files for record in path.read_text().split())
    assert set(counts) <= set(RECORDS)
    return [record for record in RECORDS if not counts[record]], [record for record in counts if counts[record] > 1]


def test_a_lost_and_a_doubled_record_are_noticed(tmp_path: Path) -> None:
    """The check of the runs below can fail."""
    (tmp_path / "0-0").write_text("\n".join(RECORDS[:-1]))
    (tmp_path / "1-0").write_text("\n".join(RECORDS))
    assert lost_and_doubled(tmp_path, 0) == ([RECORDS[-1]], [])
    (tmp_path / "0-1").write_text("\n".join(RECORDS[-2:]))
    assert lost_and_doubled(tmp_path, 0) == ([], [RECORDS[-2]])
    assert lost_and_doubled(tmp_path, 1) == ([], [])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(examples(2, 60)))
def test_each_record_is_saved_once_a_pass(tmp_path: Path, seed: int) -> None:
    """Whatever happens to readers and Redis; and one reader of each task is told that it is done."""
    draw = random.Random(seed)
    kind = ("reader", "queue")[seed % 2]
    with (
        DurableRedis(tmp_path / "redis") as server,
        running_consumers(tmp_path, server.url, kind) as consumers,
        BlockingTaskQueue(server.url, "default", consumer.JOB, worker="test") as queue,
    ):
        wait_until(lambda: consumers.saved() > 0)
        for fault in draw.sample(FAULTS, len(FAULTS)):
            before = consumers.saved()
            enough = min(before + draw.randint(1, 6), PASSES * TASKS)
            wait_until(lambda enough=enough: consumers.saved() >= enough)
            time.sleep(draw.uniform(0, 0.1))  # so that it comes anywhere in a task
            hurt(fault, consumers, server, queue, draw)
        consumers.await_end()
        report = queue.report()
        assert (report.pass_number, report.done, report.is_over) == (PASSES - 1, TASKS, True)
    for pass_number in range(PASSES):
        assert lost_and_doubled(consumers.out, pass_number) == ([], [])
    accepted = [line for path in consumers.out.glob("accepted.*") for line in path.read_text().split()]
    assert len(accepted) == len(set(accepted))
