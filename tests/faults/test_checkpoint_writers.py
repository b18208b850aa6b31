"""Writers of checkpoints that are killed, meet, or have no room: never a wrong load, never a good one lost."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from pathlib import Path

import pytest
from support.checkpoints.snapshots import is_whole, steps_of, stored
from support.checkpoints.writer_process import write
from support.depth import examples

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["edl_runtime.checkpoint.writer", "numpy", "pytest"])


class Writer:
    """A process that writes checkpoints, and what it tells."""

    def __init__(self, place: Path, steps: range, **how: int) -> None:
        self.told: list[str] = []
        self._ear, mouth = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(target=write, args=(mouth, place, steps), kwargs=how)
        self.process.start()
        mouth.close()

    def tells(self, word: str) -> None:
        """Wait until it says this."""
        while not (self.told and self.told[-1].startswith(word)):
            self.told.append(self._ear.recv())

    def end(self) -> list[str]:
        """Wait until it ends; return all that it told."""
        with contextlib.suppress(EOFError):
            self.tells("its end")
        self.process.join()
        return self.told


def test_a_writer_killed_at_any_moment_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    """At moments drawn by chance: what is newest is whole, and no older than the last that was told."""
    chance, kills = random.Random(5), examples(6, 40)
    told, first = 0, 1
    store = stored(tmp_path)
    for number in range(kills):
        writer = Writer(tmp_path, range(first, first + 1000))
        writer.tells("saved" if number % 2 else "writing")
        time.sleep(chance.uniform(0.0, 0.15))
        writer.process.kill()
        told = max([told, *(int(word.split()[1]) for word in writer.end() if word.startswith("saved"))])
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
def test_two_writers_of_the_same_steps_never_mix(tmp_path: Path, generations: tuple[int, int]) -> None:
    """Each checkpoint is of one of them, and both can be loaded."""
    both = [Writer(tmp_path, range(1, 6), generation=generation, keep=100) for generation in generations]
    assert [writer.end() for writer in both] == [["writing", *(f"saved {step}" for step in range(1, 6))]] * 2
    store = stored(tmp_path)
    positions = [(generation, step) for generation in generations for step in range(1, 6)]
    assert [info.position for info in store.list()] == sorted(positions, reverse=True)
    assert all(is_whole(store.load(info)) for info in store.list())


def test_two_writers_that_prune_lose_none_of_the_newest(tmp_path: Path) -> None:
    """Each removes what the other may be removing at the same time."""
    both = [Writer(tmp_path, range(1, 16)) for _ in range(2)]
    assert [(writer.end()[-1], writer.process.exitcode) for writer in both] == [("saved 15", 0)] * 2
    store = stored(tmp_path)
    newest = store.load_newest()
    assert newest is not None
    assert newest[0].manifest.step == 15
    assert all(is_whole(store.load(info)) for info in store.list())
    assert len(store.list()) >= 2


def test_a_full_disk_stops_no_training_and_loses_nothing(tmp_path: Path) -> None:
    """The error is told at each try, what was stored before can be loaded, and half a checkpoint takes no room."""
    stored(tmp_path, 3)
    told = Writer(tmp_path, range(4, 6), limit=300_000).end()
    assert len([text for text in told if "could not be written" in text and "File too large" in text]) == 2
    store = stored(tmp_path)
    assert steps_of(store) == [3]
    assert len(list(tmp_path.iterdir())) == 1
    assert "saved 6" in Writer(tmp_path, range(6, 7)).end()
