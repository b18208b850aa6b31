"""Checkpoints that are written while training continues."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs
from support.checkpoints.snapshots import is_whole, snapshot_at, steps_of, stored

from edl_runtime.checkpoint import file_format
from edl_runtime.checkpoint.background_writer import CheckpointWriter
from edl_runtime.checkpoint.errors import CheckpointStoreError
from edl_runtime.checkpoint.file_format import CheckpointInfo, Snapshot, write_checked


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Stores write nothing until this event is set."""
    free = threading.Event()

    def held_up(*args: Any) -> Any:
        assert free.wait(30)
        return write_checked(*args)

    monkeypatch.setattr(file_format, "write_checked", held_up)
    yield free
    free.set()


def test_the_arrays_are_those_of_the_moment(tmp_path: Path, held: threading.Event) -> None:
    """Training changes the same memory while they are written, and its end waits only for the given time."""
    store = stored(tmp_path)
    writer = CheckpointWriter(store)
    snapshot = snapshot_at(5)
    assert writer.save(lambda: snapshot)
    for group in snapshot.arrays.values():
        for array in group.values():
            array[:] = -1
    assert not writer.close(timeout_s=0.01)
    held.set()
    assert writer.close()
    found = store.load_newest()
    assert found is not None
    assert is_whole(found[1])


def test_memory_is_reused(tmp_path: Path) -> None:
    """Fresh memory costs more than the copy; another shape gets memory of its own."""
    writer = CheckpointWriter(stored(tmp_path))
    writer.prepare(snapshot_at(0).arrays)
    writer.save(lambda: snapshot_at(1))
    writer.wait()
    first = writer._buffers.copy(snapshot_at(1)).arrays["model"]["weight"]
    assert np.shares_memory(first, writer._buffers.copy(snapshot_at(2)).arrays["model"]["weight"])
    assert writer._buffers.copy(snapshot_at(3, size=7)).arrays["model"]["weight"].shape == (7,)


def test_a_slow_store_does_not_stop_training(tmp_path: Path, held: threading.Event) -> None:
    """A checkpoint that is due while another is being written is skipped with a warning; the next one is written."""
    store = stored(tmp_path)
    writer = CheckpointWriter(store)
    taken: list[int] = []

    def capture(step: int) -> Snapshot:
        taken.append(step)
        return snapshot_at(step)

    with capture_logs() as logs:
        assert [writer.save(partial(capture, step)) for step in (1, 2, 3)] == [True, False, False]
    assert not writer.wait(0.01)
    assert taken == [1]
    assert [each["event"] for each in logs] == ["checkpoint.skipped", "checkpoint.skipped"]
    held.set()
    assert writer.wait(30)
    assert writer.save(lambda: capture(4))
    assert writer.close(30)
    assert steps_of(store) == [4, 1]


def test_a_failure_is_notified_and_the_next_checkpoint_is_tried(tmp_path: Path) -> None:
    """It is not raised in the training."""
    notes: list[str] = []
    place = tmp_path / "place"
    place.write_text("in the way")
    store = stored(place)
    writer = CheckpointWriter(store, notify=notes.append)
    with capture_logs() as logs:
        assert writer.save(lambda: snapshot_at(1))
        assert writer.wait(30)
    assert len(notes) == 1
    assert notes[0].startswith(f"a checkpoint could not be written: checkpoint folder {place} can't be used")
    assert [(each["event"], each["step"]) for each in logs] == [("checkpoint.failed", 1)]
    place.unlink()
    assert writer.save(lambda: snapshot_at(2))
    assert writer.close(30)
    assert steps_of(store) == [2]


@pytest.mark.parametrize("error", [MemoryError(), ValueError("no such codec"), None])
def test_a_failure_of_any_kind_is_notified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Once in the log, too, and training goes on; so it is if the report can't encode the folder's name."""
    notes: list[str] = []
    folder = tmp_path / os.fsdecode(b"\xff")
    store = stored(folder)
    if error is not None:
        monkeypatch.setattr(store, "write", Mock(side_effect=error))
    writer = CheckpointWriter(store, saved=lambda info, _: msgspec.json.encode(info.url), notify=notes.append)
    with capture_logs() as logs:
        assert writer.save(lambda: snapshot_at(1))
        assert writer.close(30)
    (note,) = notes
    cause = type(error).__name__ if error else "UnicodeEncodeError"
    assert note.startswith(f"a checkpoint could not be written: {cause}: ")
    (failed,) = [each for each in logs if each["log_level"] == "warning"]
    assert (failed["event"], failed["step"]) == ("checkpoint.failed", 1)
    assert failed["cause"].startswith(cause)


def test_save_now_returns_a_stored_checkpoint_or_raises(tmp_path: Path) -> None:
    """The next run continues from it."""
    store = stored(tmp_path / "place")
    writer = CheckpointWriter(store)
    writer.save(lambda: snapshot_at(1))
    assert is_whole(store.load(writer.save_now(lambda: snapshot_at(2))))
    assert steps_of(store) == [2, 1]
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointStoreError):
        CheckpointWriter(stored(tmp_path / "file")).save_now(lambda: snapshot_at(1))
    writer.close()


def test_save_now_writes_a_step_again_only_with_other_metrics(tmp_path: Path) -> None:
    """A checkpoint of that step that is being written counts, unless the script has set metrics since."""
    store = stored(tmp_path)
    writer = CheckpointWriter(store)
    writer.save(lambda: snapshot_at(7))
    assert [writer.save_now(lambda: snapshot_at(7))] == store.list()
    evaluated = msgspec.structs.replace(snapshot_at(7), metrics={"accuracy": 0.9})
    assert writer.save_now(lambda: evaluated).manifest.metrics == {"accuracy": 0.9}
    assert {"accuracy": 0.9} in [info.manifest.metrics for info in store.list()]
    writer.close()


def test_each_checkpoint_is_reported_and_old_ones_are_pruned(tmp_path: Path) -> None:
    """`keep_last` of them stay; `saved` gets each with its duration."""
    reported: list[tuple[CheckpointInfo, float]] = []
    store = stored(tmp_path, keep_last=2)
    writer = CheckpointWriter(store, saved=lambda info, took_s: reported.append((info, took_s)))
    for step in range(5):
        assert writer.save(partial(snapshot_at, step))
        assert writer.wait(30)
    assert writer.close()
    assert steps_of(store) == [4, 3]
    assert [info.manifest.step for info, _ in reported] == list(range(5))
    assert all(took_s > 0 for _, took_s in reported)
    assert is_whole(store.load(reported[-1][0]))


def test_a_checkpoint_of_a_later_generation_is_notified_once(tmp_path: Path) -> None:
    """With its name; checkpoints of the same or earlier generations are not."""
    notes: list[str] = []
    writer = CheckpointWriter(stored(tmp_path, 9, keep_last=1), notify=notes.append)
    writer.save_now(lambda: snapshot_at(10, generation=2))
    assert notes == []
    other = stored(tmp_path, 3, generation=3)
    with capture_logs() as logs:
        kept = [writer.save_now(partial(snapshot_at, step, 2)) for step in (11, 12)]
    assert len(notes) == 1
    assert notes[0].startswith(f"{other.list()[0].name} is of a later generation")
    assert [each["event"] for each in logs].count("checkpoint.overtaken") == 1
    assert is_whole(other.load(kept[-1]))


def test_an_error_of_capture_is_raised_in_the_training(tmp_path: Path) -> None:
    """It is not an error of the store, and the writer still works."""
    writer = CheckpointWriter(stored(tmp_path))
    with pytest.raises(ZeroDivisionError):
        writer.save(lambda: snapshot_at(1 // 0))
    assert writer.save(lambda: snapshot_at(1))
    assert writer.close(30)
