"""Locks whose files come and go."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl_runtime import locks
from edl_runtime.errors import JobLockedError


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who opened the file before its holder removed it does not hold the lock beside the next one."""
    path = tmp_path / "lock"
    path.touch()
    opening = os.open

    def slow_open(*_: object) -> int:
        monkeypatch.setattr(os, "open", opening)
        opened = opening(path, os.O_RDWR | os.O_CREAT, 0o600)
        path.unlink()  # between opening and locking it
        return opened

    monkeypatch.setattr(os, "open", slow_open)
    first = locks.take(path)
    assert first is not None
    assert locks.is_held(path)
    assert locks.take(path) is None
    os.close(first)
    assert not locks.is_held(path)


async def test_a_lock_is_free_after_the_block_whoever_has_a_copy_of_it(tmp_path: Path) -> None:
    """A process that was forked in the meantime keeps nobody waiting; after an error the lock stays with the copy."""
    copies = []

    async def hold(error: Exception | None = None) -> None:
        async with locks.hold(tmp_path / "lock") as descriptor:
            copies.append(os.dup(descriptor))
            if error:
                raise error

    await hold()
    assert not locks.is_held(tmp_path / "lock")
    with pytest.raises(TimeoutError):
        await hold(TimeoutError())
    assert locks.is_held(tmp_path / "lock")
    for copy in copies:
        os.close(copy)
    assert not locks.is_held(tmp_path / "lock")


async def test_a_lock_is_held_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder's process id, which is for others to read, finds no room there."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    async with locks.hold(tmp_path / "lock"):
        assert locks.is_held(tmp_path / "lock")


HOLDS = """
import asyncio, sys
from pathlib import Path
from edl_runtime import locks

async def hold():
    async with locks.hold(Path(sys.argv[1])):
        print("held", flush=True)
        await asyncio.Event().wait()

asyncio.run(hold())
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock of job digits."""
    with subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path / "digits"], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("suspended", [True, False])
async def test_a_holder_that_does_not_end_is_named(
    tmp_path: Path, holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, *, suspended: bool
) -> None:
    """Soon if it is suspended, as `edl stop` by Ctrl-Z; and what to do is said."""
    monkeypatch.setattr(locks, "CHECK_HOLDER_S", 0.04)
    monkeypatch.setattr(locks, "SUSPENDED_S", 0.1)
    if suspended:
        holder.send_signal(signal.SIGSTOP)
    else:
        monkeypatch.setattr(locks, "HOLD_LIMIT_S", 0.5)
    with pytest.raises(JobLockedError, match=f"process {holder.pid} .* job 'digits'") as caught:
        async with locks.hold(tmp_path / "digits"):
            pass
    assert caught.value.suspended == suspended
    holder.kill()
    holder.wait()
    async with locks.hold(tmp_path / "digits"):
        pass
