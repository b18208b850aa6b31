"""Checkpoints in an object store: S3's protocol, against a server of it on this machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import BinaryIO

import pytest
from structlog.testing import capture_logs
from support.checkpoints.snapshots import is_whole, snapshot_at, steps_of, stored
from support.object_store import files, harm

from edl_runtime.checkpoint import file_format
from edl_runtime.checkpoint.errors import (
    CheckpointStoreError,
    DamagedCheckpointError,
    NoWholeCheckpointError,
    UnfinishedCheckpointError,
)
from edl_runtime.checkpoint.file_format import DRAFT, MANIFEST, FileRecord, position_of, write_checked
from edl_runtime.checkpoint.store import ABANDONED_AFTER_S, CheckpointStore
from edl_runtime.specs import Checkpoint

LATER = 2 * ABANDONED_AFTER_S


def test_what_was_written_is_loaded_and_old_ones_are_removed(bucket: str) -> None:
    """As from a folder; objects are the format's files and nothing else."""
    store = CheckpointStore(Checkpoint(url=bucket + "/", keep_last=2))
    store.check()
    assert store.load_newest() is None
    for step in (1, 2, 3):
        info = store.write(snapshot_at(step, size=500_000))
    found = store.load_newest()
    assert found is not None
    assert found[0] == info
    assert is_whole(found[1])
    assert info.url == f"{bucket}/{info.name}"
    assert len(list(store.prune())) == 1
    assert steps_of(store) == [3, 2]
    names = [path.rpartition("/")[2] for path in files().find(bucket)]
    assert Counter(names) == dict.fromkeys(["model.safetensors", "optimizer.safetensors", "extra.json", MANIFEST], 2)


def test_a_half_uploaded_or_damaged_one_is_passed_by(bucket: str) -> None:
    """The manifest comes last; unfinished ones are removed when they can't have a writer any more."""
    store = stored(bucket, 1, 2, 3)
    half, flipped, _ = store.list()
    model = f"{flipped.url}/model.safetensors"
    content = files().cat_file(model)
    files().mv(f"{half.url}/{MANIFEST}", f"{half.url}/{DRAFT}")
    files().pipe_file(model, content[:500] + bytes([content[500] ^ 1]) + content[501:])
    with capture_logs() as logs:
        found = store.load_newest()
    assert found is not None
    assert found[1].step == 1
    assert [each.get("problem") for each in logs] == [None, "model.safetensors: check sum differs"]
    files().rm(model)
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors is missing"):
        store.verify(flipped.name)
    assert list(store.prune()) == []
    assert half.name in store.prune(now=time.time() + LATER)
    assert not files().exists(half.url)


@pytest.mark.parametrize("file", [MANIFEST, "model.safetensors", "extra.json"])
def test_an_object_that_the_store_itself_finds_damaged_is_passed_by(bucket: str, file: str) -> None:
    """The client checks the store's own checksum before ours: training goes back, and pruning goes on."""
    store = stored(bucket, 1, 2, 3, keep_last=1)
    damaged, *_ = store.list()
    harm(f"{damaged.url}/{file}")
    fresh = stored(bucket, keep_last=1)
    found = fresh.load_newest()
    assert found is not None
    assert found.snapshot.step == 2
    (skipped,) = found.skipped
    assert isinstance(skipped, DamagedCheckpointError)
    assert skipped.problem.startswith(f"{file}: ")
    assert [position_of(name).step for name in stored(bucket, keep_last=1).prune()] == [1]
    with pytest.raises(DamagedCheckpointError):
        stored(bucket).verify(damaged.name)


def test_an_upload_that_breaks_off_leaves_nothing(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a checkpoint nor objects that cost money."""
    room = [True]

    def fail(file: BinaryIO, pieces: Iterable[memoryview], _: Callable[[], None] | None = None) -> FileRecord:
        if not room:
            raise PermissionError("no more")
        room.pop()
        return write_checked(file, pieces)

    monkeypatch.setattr(file_format, "write_checked", fail)
    with pytest.raises(CheckpointStoreError, match="no more"):
        stored(bucket).write(snapshot_at(1))
    assert files().find(bucket) == []


def test_where_all_manifests_are_gone_no_training_begins(bucket: str) -> None:
    """Unlike where the first was never finished: that one is marked as a draft from its first byte."""
    store = stored(bucket)
    with store._storage.draft("step-000000001-gen-000001-0a1b2c3d") as create:
        with create("model.safetensors") as file:
            file.write(b"half")
        assert store.load_newest() is None
        with pytest.raises(UnfinishedCheckpointError, match="is being written, or its writer has died"):
            store.info("step-000000001-gen-000001-0a1b2c3d")
    files().rm(f"{store.write(snapshot_at(2)).url}/{MANIFEST}")
    with pytest.raises(NoWholeCheckpointError, match=f"2 damaged: .* its {MANIFEST} is gone"):
        store.load_newest()


def test_a_missing_bucket_is_refused_at_the_start(bucket: str) -> None:
    """With the URL and what to do; no bucket is created."""
    with pytest.raises(CheckpointStoreError, match=r"checkpoint folder s3://elsewhere/job can't be used .*bucket"):
        stored(bucket.replace("bucket/nightly", "elsewhere/job")).check()
    assert not files().exists("elsewhere")


def test_a_store_that_does_not_answer_is_an_error_with_its_address(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its address."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(CheckpointStoreError, match=r"127\.0\.0\.1:9"):
        stored(bucket, 1)
