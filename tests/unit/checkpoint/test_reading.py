"""How a checkpoint is read that takes long: each piece once, and whoever waits for it is told of each."""

from __future__ import annotations

from collections import Counter
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, Self, cast

import pytest
from support.checkpoints.snapshots import is_whole, stored

from edl_runtime.checkpoint import contents, files
from edl_runtime.checkpoint.manifest import MANIFEST
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.specs import Checkpoint


def test_a_piece_that_can_not_be_had_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of those before it: a large checkpoint takes long to read, and any of it may fail once."""
    answers: list[None] = []
    stored(tmp_path, 1)
    store = CheckpointStore(Checkpoint(url=str(tmp_path)), answered=lambda: answers.append(None))
    monkeypatch.setattr(files, "AT_ONCE", 128)
    asked: list[str] = []
    trouble = [("optimizer.safetensors", 2)]
    real_open = store._storage.open

    def flaky_open(folder: str, name: str) -> BinaryIO:
        return cast(BinaryIO, Flaky(real_open(folder, name), name, asked, trouble))

    monkeypatch.setattr(store._storage, "open", flaky_open)
    found = store.load_newest()
    assert found is not None
    assert is_whole(found[1])
    pieces = {name: -(-record.size // 1024) for name, record in found[0].manifest.files.items()}
    assert pieces["optimizer.safetensors"] > 3
    assert trouble == []
    assert Counter(asked) == pieces | {"optimizer.safetensors": pieces["optimizer.safetensors"] + 1}
    assert len(answers) == 2 + 3 + sum(pieces.values())  # the list, the manifest, each file opened, each piece


class Flaky:
    """A file that can't be read once."""

    def __init__(self, file: BinaryIO, name: str, asked: list[str], trouble: list[tuple[str, int]]) -> None:
        self._file = cast(RawIOBase, file)
        self._name, self._asked, self._trouble = name, asked, trouble

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, size: int = -1) -> bytes | None:
        return self._file.read(size)

    def readinto(self, room: memoryview) -> int | None:
        self._asked.append(self._name)
        if (self._name, self._asked.count(self._name)) in self._trouble:
            self._trouble.clear()
            raise ConnectionError("away for a moment")
        return self._file.readinto(room)


def test_what_is_known_is_not_read_again_while_it_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else comes and goes: older ones that are removed, one that is unfinished."""
    store = stored(tmp_path, 1, 2, 3)
    known = store.load_newest()
    unfinished = Path(store.list()[-1].url).rename(tmp_path / "step-000000004-gen-000001-0a1b2c3d")
    (unfinished / MANIFEST).rename(tmp_path / "kept.json")
    with monkeypatch.context() as patched:
        patched.setattr(contents, "read_checked", None)
        assert store.load_newest(known) is known
    stored(tmp_path, 5)
    found = store.load_newest(known)
    assert found is not None
    assert found[1].step == 5
