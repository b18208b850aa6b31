"""Writers of checkpoints that are killed, meet, or have no room: never a wrong load, never a good one lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints.snapshots import is_whole, steps_of, stored
from support.depth import examples
from support.paths import TESTS


class Writers:
    """The process that forks writers, and what they print."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, place: Path, *writers: tuple[int, int, int, int, int]) -> None:
        """Start writers: first step, how many, generation, how many are kept, the limit of a file's bytes or 0."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(f"{place} {' '.join(map(str, each))}" for each in writers) + "\n")

    def lines_until(self, *words: str) -> list[str]:
        """Return the lines that are printed until each of these words has begun one."""
        assert self._process.stdout is not None
        lines: list[str] = []
        while not all(any(line.startswith(word) for line in lines) for word in words):
            lines.append(self._process.stdout.readline())
            assert lines[-1], "the writers' process has ended"
        return lines

    def run(self, place: Path, *writers: tuple[int, int, int, int, int]) -> list[str]:
        """Have them write to their ends; return the lines that they print."""
        self.start(place, *writers)
        lines = self.lines_until("ended")
        assert lines[-1].split()[1:] == ["0"] * len(writers)
        return lines


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, "-m", "support.checkpoints.writer_process"],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
    ) as process:
        yield Writers(process)
        process.communicate()


def test_a_writer_killed_at_any_moment_loses_nothing_that_was_stored(writers: Writers, tmp_path: Path) -> None:
    """At moments drawn by chance: what is newest is whole, and no older than the last that was told."""
    chance, kills = random.Random(5), examples(6, 40)
    told, first = 0, 1
    store = stored(tmp_path)
    for number in range(kills):
        writers.start(tmp_path, (first, 1000, 1, 2, 0))
        lines = writers.lines_until("children", "writing")
        (child,) = (int(line.split()[1]) for line in lines if line.startswith("children"))
        if number % 2:
            lines += writers.lines_until("saved")
        time.sleep(chance.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        lines += writers.lines_until("ended")
        told = max([told, *(int(line.split()[1]) for line in lines if line.startswith("saved"))])
        found = store.load_newest()
        if found is None:
            assert told == 0
            continue
        assert is_whole(found[1])
        assert found[1].step >= told
        first = found[1].step + 1
    assert told > 0
    left = len(list(tmp_path.iterdir()))
    removed = store.prune(now=time.time() + 1e6)
    assert 0 < len(removed) <= 2 * kills  # a draft or a half removed one for each, or both
    assert left - len(removed) == len(store.list()) == len(list(tmp_path.iterdir()))


@pytest.mark.parametrize("generations", [(1, 2), (1, 1)], ids=["of two generations", "of one, as one taken for dead"])
def test_two_writers_of_the_same_steps_never_mix(
    writers: Writers, tmp_path: Path, generations: tuple[int, int]
) -> None:
    """Each checkpoint is of one of them, and both can be loaded."""
    printed = writers.run(tmp_path, *((1, 5, generation, 100, 0) for generation in generations))
    assert len([line for line in printed if line.startswith("saved")]) == 10
    store = stored(tmp_path)
    positions = [(generation, step) for generation in generations for step in range(1, 6)]
    assert [info.position for info in store.list()] == sorted(positions, reverse=True)
    assert all(is_whole(store.load(info)) for info in store.list())


def test_two_writers_that_prune_lose_none_of_the_newest(writers: Writers, tmp_path: Path) -> None:
    """Each removes what the other may be removing at the same time."""
    writers.run(tmp_path, *[(1, 15, 1, 2, 0)] * 2)
    store = stored(tmp_path)
    newest = store.load_newest()
    assert newest is not None
    assert newest[0].manifest.step == 15
    assert all(is_whole(store.load(info)) for info in store.list())
    assert len(store.list()) >= 2


def test_a_full_disk_stops_no_training_and_loses_nothing(writers: Writers, tmp_path: Path) -> None:
    """The error is told at each try, what was stored before can be loaded, and half a checkpoint takes no room."""
    stored(tmp_path, 3)
    printed = writers.run(tmp_path, (4, 2, 1, 2, 300_000))
    assert len([line for line in printed if line.startswith("failed") and "File too large" in line]) == 2
    store = stored(tmp_path)
    assert steps_of(store) == [3]
    assert len(list(tmp_path.iterdir())) == 1
    assert "saved 6\n" in writers.run(tmp_path, (6, 1, 1, 2, 0))
