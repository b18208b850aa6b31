"""Checkpoints in an object store: S3's protocol, against a server of it on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import BinaryIO

import pytest
from structlog.testing import capture_logs
from support.checkpoints.snapshots import is_whole, snapshot_at, steps_of, stored
from support.object_store import files

from edl_runtime.checkpoint import contents
from edl_runtime.checkpoint.files import write_checked
from edl_runtime.checkpoint.manifest import MANIFEST, FileRecord
from edl_runtime.checkpoint.store import ABANDONED_AFTER_S, CheckpointStore
from edl_runtime.checkpoint.writer import CheckpointWriter
from edl_runtime.errors import CheckpointStoreError, EdlError
from edl_runtime.specs import Checkpoint

LATER = 2 * ABANDONED_AFTER_S


def test_what_was_written_is_loaded(bucket: str) -> None:
    """As from a folder; objects are the format's files and nothing else."""
    store = stored(bucket)
    store.check()
    assert store.load_newest() is None
    info = store.write(snapshot_at(5, size=500_000))
    found = store.load_newest()
    assert found is not None
    assert found[0] == info
    assert is_whole(found[1])
    names = {path.rpartition("/")[2] for path in files().find(bucket)}
    assert names == {"model.safetensors", "optimizer.safetensors", "extra.json", MANIFEST}
    assert info.url == f"{bucket}/{info.name}"


def test_a_half_uploaded_one_is_none(bucket: str) -> None:
    """The manifest comes last. What was left behind is removed when nobody can be writing it any more."""
    store = stored(bucket, 1, 2)
    half = store.list()[0]
    files().rm(f"{half.url}/{MANIFEST}")
    newest = store.load_newest()
    assert newest is not None
    assert newest[0].manifest.step == 1
    assert list(store.prune()) == []
    assert list(store.prune(now=time.time() + LATER)) == [half.name]
    assert not files().exists(half.url)


def test_a_damaged_one_is_passed_by(bucket: str) -> None:
    """Torn, with another byte, or without a file."""
    store = stored(bucket, 1, 2, 3, 4)
    s3 = files()
    missing, torn, flipped, _ = (f"{info.url}/model.safetensors" for info in store.list())
    content = s3.cat_file(torn)
    s3.rm(missing)
    s3.pipe_file(torn, content[:-7])
    s3.pipe_file(flipped, content[:500] + bytes([content[500] ^ 1]) + content[501:])
    with capture_logs() as logs:
        found = store.load_newest()
    assert found is not None
    assert found[1].step == 1
    damage = [each["damage"][0] for each in logs]
    assert damage[0] == "model.safetensors is missing"
    assert damage[1].startswith(f"model.safetensors: {len(content) - 7} bytes of {len(content)}")
    assert damage[2] == "model.safetensors: other content than was written"


def test_an_upload_that_breaks_off_leaves_nothing(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a checkpoint nor objects that are paid for."""
    room = [True]

    def fail(file: BinaryIO, pieces: Iterable[memoryview], _: Callable[[], None] | None = None) -> FileRecord:
        if not room:
            raise PermissionError("no more")
        room.pop()
        return write_checked(file, pieces)

    monkeypatch.setattr(contents, "write_checked", fail)
    with pytest.raises(CheckpointStoreError, match="no more"):
        stored(bucket).write(snapshot_at(1))
    assert files().find(bucket) == []


def test_old_ones_are_removed(bucket: str) -> None:
    """With all of their objects."""
    store = CheckpointStore(Checkpoint(url=bucket + "/", keep_last=2))
    for step in (1, 2, 3, 4):
        store.write(snapshot_at(step))
    assert len(store.prune()) == 2
    assert steps_of(store) == [4, 3]
    assert len(files().find(bucket)) == 8


def test_a_bucket_that_is_not_there_is_told_at_the_start(bucket: str) -> None:
    """With the URL and what to do."""
    with pytest.raises(CheckpointStoreError, match=r"checkpoints can't be kept at s3://elsewhere/job .*bucket"):
        stored(bucket.replace("bucket/nightly", "elsewhere/job")).check()


@pytest.mark.slow
def test_a_store_that_goes_away_does_not_stop_the_training(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is told, and once it answers again the next one is stored."""
    failures: list[EdlError] = []
    with monkeypatch.context() as away:
        away.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
        away.setenv("AWS_MAX_ATTEMPTS", "1")
        writer = CheckpointWriter(stored(bucket), failed=failures.append)
        assert writer.save(lambda: snapshot_at(1))
        assert writer.close(60)
    assert [type(each) for each in failures] == [CheckpointStoreError]
    assert "127.0.0.1:9" in str(failures[0])
    writer = CheckpointWriter(stored(bucket))
    assert is_whole(stored(bucket).load(writer.save_now(lambda: snapshot_at(2))))
