"""Writers of checkpoints that are killed, meet, or have no room: never a wrong load, never a good one lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from support.checkpoints.snapshots import is_whole, steps_of, stored
from support.paths import SUPPORT

SCRIPT = SUPPORT / "checkpoints" / "writer_process.py"


def writing(place: Path | str, *numbers: int) -> subprocess.Popen[str]:
    """Start a process that writes: first step, how many, generation, how many are kept, the limit of a file's bytes."""
    command = [sys.executable, str(SCRIPT), str(place), *map(str, numbers)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )


def lines_until(process: subprocess.Popen[str], word: str) -> list[str]:
    """Return the lines that a process prints, up to the first that begins with a word."""
    assert process.stdout is not None
    lines = [""]
    while not lines[-1].startswith(word):
        lines.append(process.stdout.readline())
        assert lines[-1], process.stderr
    return lines[1:]


def finished(process: subprocess.Popen[str]) -> list[str]:
    """Return the lines that a process printed till its end."""
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return printed.splitlines()


def test_a_writer_killed_at_any_moment_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    """Twenty times, at moments drawn by chance: what is newest is whole, and no older than the last that was told."""
    chance = random.Random(5)
    told, first = 0, 1
    store = stored(tmp_path)
    process = writing(tmp_path)
    assert process.stdin is not None
    for _ in range(20):
        process.stdin.write(f"{first} 1000 1 2\n")
        lines = lines_until(process, "child")
        if "writing\n" not in lines:
            lines += lines_until(process, "writing")
        (child,) = (int(line.split()[1]) for line in lines if line.startswith("child"))
        time.sleep(chance.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        lines += lines_until(process, "ended")
        told = max([told, *(int(line.split()[1]) for line in lines if line.startswith("saved"))])
        found = store.load_newest()
        if found is None:
            assert told == 0
            continue
        assert is_whole(found[1])
        assert found[1].step >= told
        first = found[1].step + 1
    finished(process)
    assert told > 0
    left = len(list(tmp_path.iterdir()))
    removed = store.prune(now=time.time() + 1e6)
    assert 0 < len(removed) <= 40  # a draft or a half removed one for each, or both
    assert left - len(removed) == len(store.list()) == len(list(tmp_path.iterdir()))


def test_two_writers_of_the_same_steps_never_mix(tmp_path: Path) -> None:
    """Each checkpoint is of one of them, and both can be loaded."""
    first, second = writing(tmp_path, 1, 10, 1, 100), writing(tmp_path, 1, 10, 2, 100)
    finished(first)
    finished(second)
    store = stored(tmp_path)
    assert len(store.list()) == 20
    assert all(is_whole(store.load(info)) for info in store.list())
    assert [info.position for info in store.list()[:10]] == [(2, step) for step in range(10, 0, -1)]


def test_two_writers_of_one_step_in_one_generation_leave_both_whole(tmp_path: Path) -> None:
    """As when one that was taken for dead goes on writing."""
    processes = [writing(tmp_path, 7, 1, 1, 100) for _ in range(2)]
    for process in processes:
        assert "saved 7" in finished(process)
    store = stored(tmp_path)
    assert steps_of(store) == [7, 7]
    assert all(is_whole(store.load(info)) for info in store.list())


def test_two_writers_that_prune_lose_none_of_the_newest(tmp_path: Path) -> None:
    """Each removes what the other may be removing at the same time."""
    processes = [writing(tmp_path, 1, 15, 1, 2) for _ in range(2)]
    for process in processes:
        finished(process)
    store = stored(tmp_path)
    newest = store.load_newest()
    assert newest is not None
    assert newest[0].manifest.step == 15
    assert all(is_whole(store.load(info)) for info in store.list())
    assert len(store.list()) >= 2


def test_a_full_disk_stops_no_training_and_loses_nothing(tmp_path: Path) -> None:
    """The error is told at each try, what was stored before can be loaded, and half a checkpoint takes no room."""
    stored(tmp_path, 3)
    printed = finished(writing(tmp_path, 4, 2, 1, 2, 300_000))
    assert len([line for line in printed if line.startswith("failed") and "File too large" in line]) == 2
    store = stored(tmp_path)
    assert steps_of(store) == [3]
    assert len(list(tmp_path.iterdir())) == 1
    assert "saved 6" in finished(writing(tmp_path, 6, 1, 1, 2))
