"""Writers of checkpoints that are killed, collide, or find a full disk: none loads wrongly, and no good one is lost."""

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
PROCESSES.set_forkserver_preload(["edl_runtime.checkpoint.background_writer", "numpy", "pytest"])


class Writer:
    """A process that writes checkpoints, and its messages."""

    def __init__(self, place: Path, steps: range, **how: int) -> None:
        self.messages: list[str] = []
        self._receiver, mouth = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(target=write, args=(mouth, place, steps), kwargs=how)
        self.process.start()
        mouth.close()

    def tells(self, word: str) -> None:
        """Wait for a message that starts so."""
        while not (self.messages and self.messages[-1].startswith(word)):
            self.messages.append(self._receiver.recv())

    def end(self) -> list[str]:
        """Wait until it ends; return all its messages."""
        with contextlib.suppress(EOFError):
            self.tells("its end")
        self.process.join()
        return self.messages


def test_a_writer_killed_at_any_moment_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    """At random moments: the newest one is intact, and at least as new as the last one that was reported."""
    chance, kills = random.Random(5), examples(6, 40)
    reported, first = 0, 1
    store = stored(tmp_path)
    for number in range(kills):
        writer = Writer(tmp_path, range(first, first + 1000))
        writer.tells("saved" if number % 2 else "writing")
        time.sleep(chance.uniform(0.0, 0.15))
        writer.process.kill()
        reported = max([reported, *(int(word.split()[1]) for word in writer.end() if word.startswith("saved"))])
        found = store.load_newest()
        if found is None:
            assert reported == 0
            continue
        assert is_whole(found[1])
        assert found[1].step >= reported
        first = found[1].step + 1
    assert reported > 0
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
    """Each try reports the error, older checkpoints can be loaded, and half a checkpoint takes no space."""
    stored(tmp_path, 3)
    reported = Writer(tmp_path, range(4, 6), limit=300_000).end()
    assert len([text for text in reported if "could not be written" in text and "File too large" in text]) == 2
    store = stored(tmp_path)
    assert steps_of(store) == [3]
    assert len(list(tmp_path.iterdir())) == 1
    assert "saved 6" in Writer(tmp_path, range(6, 7)).end()
