"""Locks whose files come and go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edl_runtime.backends.local import locks


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
