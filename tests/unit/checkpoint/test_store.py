"""Checkpoints in a folder: written, found, loaded, verified and pruned."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, Self, cast

import fsspec  # type: ignore[import-untyped]
import msgspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from structlog.testing import capture_logs
from support.checkpoints.snapshots import flip, is_whole, reformat, snapshot_at, steps_of, store_not_finite, stored
from support.special_files import SPECIAL, put

from edl_runtime.checkpoint import file_format, storage
from edl_runtime.checkpoint.errors import (
    CheckpointStoreError,
    DamagedCheckpointError,
    MissingExtraError,
    NoWholeCheckpointError,
    UnfinishedCheckpointError,
    UnknownFormatError,
)
from edl_runtime.checkpoint.file_format import DRAFT, MANIFEST, CheckpointInfo, Manifest, read_checked, write_checked
from edl_runtime.checkpoint.finite import all_finite
from edl_runtime.checkpoint.folder_lease import FolderLock
from edl_runtime.checkpoint.store import ABANDONED_AFTER_S, CheckpointStore
from edl_runtime.errors import SpecError
from edl_runtime.files import LIMIT
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Checkpoint

LATER = 2 * ABANDONED_AFTER_S
DRAFT_NAME = "step-000000004-gen-000001-0a1b2c3d"


def folder_of(place: Path, step: int) -> Path:
    """Return the folder with the checkpoint of a step."""
    (found,) = place.glob(f"step-{step:09d}-*")
    return found


def test_what_was_written_is_loaded(tmp_path: Path) -> None:
    """Arrays, other values, and what the manifest contains."""
    store = stored(tmp_path / "new" / "place")
    before = time.time()
    written = store.write(snapshot_at(step=25, generation=3))
    found = store.load_newest()
    assert found is not None
    info, snapshot, *_ = found
    assert info == written == store.list()[0]
    assert (snapshot.generation, snapshot.step, snapshot.epoch, snapshot.metrics) == (3, 25, 2, {"loss": 1 / 26})
    assert is_whole(snapshot)
    assert snapshot.arrays["model"]["weight"].flags.writeable
    assert before <= info.manifest.created_at <= time.time()
    assert Path(info.url).is_dir()
    assert info.size_bytes == sum(path.stat().st_size for path in Path(info.url).iterdir() if path.name != MANIFEST)


@pytest.mark.parametrize("first", ["a check", "a write"])
def test_a_new_place_is_there_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """Each new parent folder is synced, else a power cut could lose it with the first checkpoint."""
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    store = stored(tmp_path / "new" / "of" / "mine")
    if first == "a check":
        store.check()
    else:
        store.write(snapshot_at(1))
    assert {str(tmp_path), str(tmp_path / "new"), str(tmp_path / "new" / "of")} <= set(synced)
    synced.clear()
    store.write(snapshot_at(2))
    assert str(tmp_path / "new" / "of") not in synced


def test_where_nothing_is_nothing_is_found(tmp_path: Path) -> None:
    """As at a first start, where looking makes no folder."""
    store = stored(tmp_path / "place")
    assert store.load_newest() is None
    assert (list(store.list()), list(store.prune())) == ([], [])
    assert not (tmp_path / "place").exists()


@pytest.mark.parametrize("place", ["{}", "memory://interrupted"])
def test_where_the_first_was_never_finished_nothing_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Its writer was killed: a training begins, and once it has a checkpoint, what was left behind is removed."""
    store = stored(place.format(tmp_path))

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", killed)  # not even a local draft is cleaned up
        patched.setattr(Manifest, "encode", killed)
        with pytest.raises(KeyboardInterrupt):
            store.write(snapshot_at(1))
    (left,) = store._storage.folders()
    assert store.load_newest() is None
    store.write(snapshot_at(2))
    assert list(store.prune(now=time.time() + LATER)) == [left]
    assert len(store._storage.folders()) == 1


@pytest.mark.parametrize("place", ["{}", "memory://lost"])
def test_where_all_manifests_are_gone_no_training_begins(tmp_path: Path, place: str) -> None:
    """Their folders show that there were checkpoints. The error says what to do; nothing is removed."""
    store = stored(place.format(tmp_path), 1, 2)
    fs, root = fsspec.core.url_to_fs(store.spec.url)
    fs.rm([path for path in fs.find(root) if path.endswith(MANIFEST)])
    left = fs.find(root)
    assert len(left) == 6
    with pytest.raises(NoWholeCheckpointError) as refused:
        store.load_newest()
    newest = store._storage.url_of(store.names()[0])
    assert str(refused.value).startswith(
        f"no checkpoint at {store.spec.url} is intact, 2 damaged: checkpoint {newest} is unfinished: its {MANIFEST} is "
        "gone: it is being removed, or the manifest was deleted. See `edl checkpoints verify"
    )
    assert list(store.prune(now=time.time() + LATER)) == []
    assert fs.find(root) == left


def test_one_that_is_finished_while_it_is_looked_at_is_none_without_a_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifest did not exist yet, and its draft does not any more."""
    store = stored("memory://meanwhile")
    real_open, looked = store._storage.open, list[str]()

    def open_late(folder: str, file: str) -> BinaryIO:
        looked.append(file)
        if len(looked) == 1:
            raise FileNotFoundError
        return real_open(folder, file)

    name = store.write(snapshot_at(1)).name
    monkeypatch.setattr(store._storage, "open", open_late)
    assert store.info(name).manifest.step == 1
    assert looked == [MANIFEST, DRAFT, MANIFEST]


def test_of_a_draft_that_is_removed_the_mark_goes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption leaves a draft, and not a folder that seems to have lost its manifest."""
    store = stored("memory://unmade")
    fs = fsspec.filesystem("memory")
    removed: list[str] = []
    remove = fs.rm_file

    def noted(path: str) -> None:
        remove(path)
        removed.append(path.rpartition("/")[2])

    def fail(*_: object) -> None:
        raise PermissionError("no more")

    monkeypatch.setattr(type(fs), "rm_file", lambda _, path: noted(path))
    monkeypatch.setattr(Manifest, "encode", fail)
    with pytest.raises(CheckpointStoreError, match="no more"):
        store.write(msgspec.structs.replace(snapshot_at(1), arrays={"a": {"b": np.zeros(1)}}))
    assert sorted(removed) == ["a.safetensors", DRAFT, "extra.json"]
    assert removed[-1] == DRAFT


def test_a_lost_manifest_is_passed_by_aloud(tmp_path: Path) -> None:
    """As any damage, where an older one is whole; one that is still being written is not."""
    store = stored(tmp_path, 1, 2, 3)
    (folder_of(tmp_path, 3) / MANIFEST).unlink()
    (folder_of(tmp_path, 2) / MANIFEST).rename(folder_of(tmp_path, 2) / DRAFT)
    with capture_logs() as logs:
        found = store.load_newest()
    assert found is not None
    assert (found.snapshot.step, [error.url for error in found.skipped]) == (1, [str(folder_of(tmp_path, 3))])
    assert [(each["log_level"], each["url"]) for each in logs] == [
        ("warning", str(folder_of(tmp_path, 3))),
        ("info", str(folder_of(tmp_path, 2))),
    ]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "extra.json", MANIFEST])
@pytest.mark.parametrize("harm", ["torn", "emptied", "longer", "flipped", "missing"])
def test_a_damaged_one_is_passed_by(tmp_path: Path, file: str, harm: str) -> None:
    """Whichever file it is and whatever has come to it: the one before is loaded, and a warning says why."""
    store = stored(tmp_path, 1, 2)
    path = folder_of(tmp_path, 2) / file
    if harm == "missing":
        path.unlink()
    elif harm == "flipped":
        flip(path, at=path.stat().st_size // 2)
    else:
        content = path.read_bytes()
        path.write_bytes({"torn": content[:-1], "emptied": b"", "longer": content + b"\0"}[harm])
    with capture_logs() as logs:
        found = store.load_newest()
    assert found is not None
    assert found[0].manifest.step == 1
    assert is_whole(found[1])
    assert {(each["event"], each["url"]) for each in logs} == {("checkpoint.unreadable", str(folder_of(tmp_path, 2)))}


def test_json_without_end_is_damage(tmp_path: Path) -> None:
    """Nested deeper than can be read, as a stranger may write it."""
    store = stored(tmp_path, 1)
    (info,) = store.list()
    endless = b'{"x":' * 20_000
    with pytest.raises(DamagedCheckpointError, match=r"extra\.json: .*recursion"):
        file_format.parse_snapshot(info, {"extra.json": np.frombuffer(endless, np.uint8)})
    (folder_of(tmp_path, 1) / MANIFEST).write_bytes(endless)
    with pytest.raises(DamagedCheckpointError, match=rf"{MANIFEST}: .*recursion"):
        store.info(info.name)


def test_what_was_passed_by_is_known(tmp_path: Path) -> None:
    """So that a training that goes back to an older one can report how far, and why."""
    store = stored(tmp_path, 1, 2, 3)
    newest, middle = folder_of(tmp_path, 3), folder_of(tmp_path, 2)
    flip(newest / MANIFEST, at=40)
    flip(middle / "extra.json")
    found = store.load_newest()
    assert found is not None
    assert [(error.url, error.problem.partition(":")[0]) for error in found.skipped] == [
        (str(newest), MANIFEST),
        (str(middle), "extra.json"),
    ]
    fresh = stored(tmp_path, 4).load_newest()
    assert fresh is not None
    assert fresh.skipped == ()


def test_a_checkpoint_of_an_unknown_format_is_not_skipped(tmp_path: Path) -> None:
    """A later version wrote it, and training would go back behind it: the error says which version, and what to do."""
    store = stored(tmp_path, 1, 2)
    reformat(folder_of(tmp_path, 2), 7)
    with pytest.raises(UnknownFormatError) as refused:
        store.load_newest()
    assert (refused.value.found, refused.value.known) == (7, 1)
    assert str(refused.value).startswith(
        f"checkpoint {folder_of(tmp_path, 2)} is of an unknown format: format 7, this version reads format 1; "
    )
    assert isinstance(refused.value, ValueError)  # wrong input: no other try would fare better
    stored(tmp_path, 3)
    assert (found := store.load_newest()) is not None
    assert found[1].step == 3


def test_the_error_says_what_is_damaged(tmp_path: Path) -> None:
    """Which file, and how much of it is there."""
    store = stored(tmp_path, 1)
    folder = folder_of(tmp_path, 1)
    flip(folder / "model.safetensors")
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors: check sum differs"):
        store.load(store.list()[0])
    os.truncate(folder / "model.safetensors", 9)
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors: only 9 of \d+ bytes"):
        store.verify(folder.name)
    (folder / MANIFEST).unlink()
    with pytest.raises(UnfinishedCheckpointError, match=MANIFEST):
        store.info(folder.name)


def test_a_manifest_of_another_checkpoint_is_not_believed(tmp_path: Path) -> None:
    """A renamed folder would count as a later one."""
    stored(tmp_path, 1)
    folder = folder_of(tmp_path, 1)
    folder.rename(tmp_path / folder.name.replace("step-000000001", "step-000000099"))
    with pytest.raises(NoWholeCheckpointError, match="it says step 1, generation 1"):
        stored(tmp_path).load_newest()


def test_where_all_are_damaged_none_is_passed_off_as_the_beginning(tmp_path: Path) -> None:
    """The error says where, how many, what is wrong with the newest and what to do; drafts count as none."""
    store = stored(tmp_path, 1, 2, 3)
    (folder_of(tmp_path, 3) / MANIFEST).rename(folder_of(tmp_path, 3) / DRAFT)
    flip(folder_of(tmp_path, 2) / "model.safetensors")
    (folder_of(tmp_path, 1) / "extra.json").unlink()
    with pytest.raises(NoWholeCheckpointError) as refused:
        store.load_newest()
    assert (refused.value.url, refused.value.damaged) == (str(tmp_path), 2)
    assert str(refused.value).startswith(
        f"no checkpoint at {tmp_path} is intact, 2 damaged: checkpoint {folder_of(tmp_path, 2)} is damaged: "
        "model.safetensors: check sum differs. See `edl checkpoints verify"
    )


def test_the_newest_stay_and_some_for_good(tmp_path: Path) -> None:
    """Retention by number and by steps; other people's files stay, too."""
    store = stored(tmp_path, 5, 10, 12, 20, 25, 30, 35)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-5.txt").write_text("mine")
    lean = CheckpointStore(Checkpoint(url=str(tmp_path), keep_last=2, keep_every=20))
    doomed = lean.prune(dry_run=True)
    assert steps_of(store) == [35, 30, 25, 20, 12, 10, 5]
    assert lean.prune() == doomed
    assert steps_of(store) == [35, 30, 20]
    assert list(lean.prune()) == []
    assert {"notes", "step-5.txt"} < {path.name for path in tmp_path.iterdir()}


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    """If the newest are damaged, older ones are all there is: `keep_last` intact ones stay."""
    store = stored(tmp_path, 1, 2, 3, 4, 5)
    for step in (4, 5):
        flip(folder_of(tmp_path, step) / "model.safetensors")
    lean = CheckpointStore(Checkpoint(url=str(tmp_path), keep_last=2))
    lean.prune()
    assert steps_of(store) == [5, 4, 3, 2]
    lean.write(snapshot_at(6))
    lean.prune()
    assert steps_of(store) == [6, 3]


def test_where_none_is_whole_all_stays(tmp_path: Path) -> None:
    """A person may be able to recover something from them."""
    store = stored(tmp_path, 1, 2)
    for step in (1, 2):
        flip(folder_of(tmp_path, step) / "model.safetensors")
    (folder_of(tmp_path, 1) / MANIFEST).unlink()
    assert list(CheckpointStore(Checkpoint(url=str(tmp_path), keep_last=1)).prune(now=time.time() + LATER)) == []
    assert steps_of(store) == [2]


@pytest.mark.parametrize(
    ("array", "is_finite"),
    [
        (np.full(1000, 3e38, np.float32), True),  # its squares are not
        (np.full(3, -math.inf), False),
        (np.array(math.nan, np.float16), False),
        (np.full(5, 60000.0, np.float16), True),
        (np.array([0x3F80, 0x7F80], np.uint16), False),  # bfloat16
        (np.array([0x3F80, 0x7F7F], np.uint16), True),
        (np.full((300, 300), 2**60), True),
        (np.empty(0, np.float32), True),
    ],
)
def test_arrays_are_finite_or_not(array: np.ndarray, *, is_finite: bool) -> None:
    """In each type, and however large."""
    assert all_finite(array) == is_finite


def test_no_run_continues_from_weights_that_are_not_finite(tmp_path: Path) -> None:
    """Unless they are asked for by name. Only what is trained counts: masks may be infinite."""
    store = stored(tmp_path, 10, 20)
    first, last = store_not_finite(store, 30, 40)
    assert last.manifest.not_finite == ["model/weight"]
    found = store.load_newest()
    assert found is not None
    assert (found.info.manifest.step, found.further) == (20, None)
    assert [str(error) for error in found.skipped] == [
        f"checkpoint {each.url} is not finite: NaN or infinity in model/weight; to continue from it nevertheless, set "
        f"EDL_CHECKPOINT_ALLOW_NOT_FINITE={each.name}"
        for each in (last, first)
    ]
    named = CheckpointStore(Checkpoint(url=str(tmp_path), allow_not_finite=first.name)).load_newest()
    assert named is not None
    assert named.info == first
    stored(tmp_path, 21, generation=2)
    later = store.load_newest()
    assert later is not None
    assert (later.info.manifest.step, later.further) == (21, None)


def test_weights_that_are_not_finite_are_not_the_beginning(tmp_path: Path) -> None:
    """If there are no others, the error says by what name to continue from them."""
    (only,) = store_not_finite(CheckpointStore(Checkpoint(url=str(tmp_path))), 10)
    with pytest.raises(NoWholeCheckpointError, match=f"set EDL_CHECKPOINT_ALLOW_NOT_FINITE={only.name}"):
        CheckpointStore(Checkpoint(url=str(tmp_path))).load_newest()


def test_weights_that_are_not_finite_push_out_no_others(tmp_path: Path) -> None:
    """They are kept apart, as many as others, until there is a newer checkpoint without NaN."""
    store = stored(tmp_path, 1, 2, 3, keep_last=2)
    for generation in (1, 2):
        store_not_finite(store, 4, 5, 6, generation=generation)
        store.prune()
        assert steps_of(store) == [6, 5, 3, 2]
    stored(tmp_path, 4, generation=3)
    CheckpointStore(Checkpoint(url=str(tmp_path), keep_last=2, keep_every=5)).prune()
    assert steps_of(store) == [4, 3]
    alone = CheckpointStore(Checkpoint(url=str(tmp_path / "other"), keep_last=2))
    store_not_finite(alone, 1, 2, 3)
    alone.prune()
    assert steps_of(alone) == [3, 2]


def test_an_earlier_generation_removes_none_of_a_later(tmp_path: Path) -> None:
    """A straggler that writes and prunes finds its own to be old, but for the last: it may have ended with that."""
    store = stored(tmp_path, 10, 20, generation=2)
    straggler = CheckpointStore(Checkpoint(url=str(tmp_path), keep_last=2))
    for step in (5, 6):
        written = straggler.write(snapshot_at(step, generation=1))
        straggler.prune()
    assert [info.position for info in store.list()] == [(2, 20), (2, 10), (1, 6)]
    assert is_whole(store.load(written))


def test_a_later_step_of_an_earlier_generation_is_kept_with_a_warning(tmp_path: Path) -> None:
    """`load_newest` warns of it, and it is pruned like any other when training has reached its step."""
    store = stored(tmp_path, 900, 901, generation=1)
    stored(tmp_path, 30, generation=2)
    fresh = CheckpointStore(Checkpoint(url=str(tmp_path), keep_last=2))
    with capture_logs() as logs:
        found = fresh.load_newest()
    assert found is not None
    assert found.further is not None
    assert (found.snapshot.step, found.further.position) == (30, (1, 901))
    assert [(log["event"], log["log_level"], log["step"]) for log in logs] == [("checkpoint.further", "warning", 901)]
    for step in (40, 50, 60):
        fresh.write(snapshot_at(step, generation=2))
        fresh.prune()
    assert [info.position for info in store.list()] == [(2, 60), (2, 50), (1, 901)]
    fresh.write(snapshot_at(901, generation=3))
    fresh.prune()
    assert [info.position for info in store.list()] == [(3, 901), (2, 60)]
    assert (again := fresh.load_newest()) is not None
    assert again.further is None


def test_an_abandoned_draft_is_removed(tmp_path: Path) -> None:
    """A draft, and a removal that was interrupted; neither is before an hour has passed without a change."""
    store = stored(tmp_path, 1, 2)
    half_removed = folder_of(tmp_path, 1)
    (half_removed / MANIFEST).unlink()
    draft = tmp_path / f".{folder_of(tmp_path, 2).name[:-8]}0a1b2c3d.partial"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"half")
    assert list(store.prune()) == []
    assert set(store.prune(now=time.time() + LATER)) == {half_removed.name, draft.name}
    assert [path.name for path in tmp_path.iterdir()] == [folder_of(tmp_path, 2).name]


@pytest.mark.parametrize("harm", ["of a later version", "flipped", "torn", "renamed"])
def test_one_whose_manifest_can_not_be_read_is_never_removed(tmp_path: Path, harm: str) -> None:
    """It is not abandoned: its writer finished it, and its arrays may be complete."""
    stored(tmp_path, 1, 2)
    folder = folder_of(tmp_path, 1)
    if harm == "of a later version":
        reformat(folder, 2)
    elif harm == "flipped":
        flip(folder / MANIFEST, at=40)
    elif harm == "torn":
        os.truncate(folder / MANIFEST, 0)
    else:
        folder = folder.rename(tmp_path / folder.name.replace("step-000000001", "step-000000099"))
    store = stored(tmp_path, 3, 4, keep_last=1)
    store.prune(now=time.time() + LATER)
    assert steps_of(store) == [4]
    assert len(list(folder.iterdir())) == 4


def test_one_that_comes_while_others_are_judged_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finishes one, of an earlier generation, after this one has looked which there are."""
    store = stored(tmp_path, 1, 2, generation=2)
    folders = store._storage.folders

    def folders_and_one_more() -> list[str]:
        found = folders()
        stored(tmp_path, 5)
        return found

    monkeypatch.setattr(store._storage, "folders", folders_and_one_more)
    assert list(store.prune()) == []
    assert 5 in steps_of(store)


def test_a_checkpoint_that_is_pruned_while_it_is_loaded_is_replaced_by_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that were listed have been removed in favour of newer ones."""
    store = stored(tmp_path, 1, 2)
    info = store.info

    def slow(name: str) -> CheckpointInfo:
        monkeypatch.undo()
        stored(tmp_path, 3, keep_last=1).prune()
        return info(name)

    monkeypatch.setattr(store, "info", slow)
    found = store.load_newest()
    assert found is not None
    assert found[1].step == 3


def test_a_checkpoint_that_can_not_be_read_now_does_not_count_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither skipped, which would lose steps, nor removed."""
    stored(tmp_path, 1, 2)
    store = stored(tmp_path, keep_last=1)

    def fail(*_: object, **__: object) -> np.ndarray:
        raise PermissionError("not now")

    with monkeypatch.context() as patched:
        patched.setattr(file_format, "read_checked", fail)
        for use in (store.load_newest, store.prune):
            with pytest.raises(CheckpointStoreError, match="not now"):
                use()
    store.prune()
    assert steps_of(store) == [2]


def test_an_interrupted_removal_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest goes first, and an interrupt is not tried again."""
    store = stored(tmp_path, 1, 2)
    tries: list[Path] = []

    def interrupted(path: Path) -> None:
        tries.append(path)
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        CheckpointStore(Checkpoint(url=str(tmp_path), keep_last=1)).prune()
    assert len(tries) == 1
    assert steps_of(store) == [2]


def test_one_that_is_removed_while_it_is_loaded_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process prunes between two files of it."""
    store = stored(tmp_path, 1, 2)

    def slow(*args: object, **kwargs: object) -> np.ndarray:
        monkeypatch.setattr(file_format, "read_checked", read_checked)
        CheckpointStore(Checkpoint(url=str(tmp_path), keep_last=1)).prune()
        return read_checked(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(file_format, "read_checked", slow)
    info = store.list()[1]
    assert is_whole(store.load(info))
    assert not Path(info.url).exists()


def test_a_path_that_can_not_be_written_to_is_refused_at_the_start(tmp_path: Path) -> None:
    """The error names the path and says what to do; a check leaves nothing behind but the folder."""
    stored(tmp_path / "place").check()
    assert list((tmp_path / "place").iterdir()) == []
    (tmp_path / "file").write_text("not a folder")
    store = stored(tmp_path / "file" / "place")
    with pytest.raises(CheckpointStoreError, match=rf"{tmp_path}/file/place .*use another folder \(EDL_CHECKPOINT\)"):
        store.check()
    with pytest.raises(CheckpointStoreError):
        store.write(snapshot_at(1))


@pytest.mark.parametrize("url", ["file://{}", "local://{}", "{}/", "~/place"])
def test_paths_are_written_in_several_ways(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a URL, with a slash at its end, from the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    info = stored(url.format(tmp_path / "place")).write(snapshot_at(1))
    assert Path(info.url).parent == tmp_path / "place"


class FilesInFolders(LocalFileSystem):  # type: ignore[misc]
    """Files of this machine, as a server of SFTP or SMB has them: a folder has to be there before its files."""

    protocol = "folders"


def test_a_remote_file_system_gets_the_folders_that_it_needs(tmp_path: Path) -> None:
    """From the check to the removal, in folders that are there and in new ones; nothing else is left."""
    fsspec.register_implementation("folders", FilesInFolders, clobber=True)
    url = f"folders://{tmp_path}/new/place"
    for _ in range(2):
        FolderLock(RuntimeSettings(), url).take()
        store = stored(url, keep_last=2)
        store.check()
        for step in (1, 2, 3):
            written = store.write(snapshot_at(step))
        found = store.load_newest()
        assert found is not None
        assert found.info == written == store.verify(written.name)
        assert is_whole(found.snapshot)
        with contextlib.suppress(KeyboardInterrupt), storage.storage_at(url).draft(DRAFT_NAME):
            raise KeyboardInterrupt
        assert DRAFT_NAME in store.prune(now=time.time() + LATER)
        assert steps_of(store) == [3, 2]
        assert len(list((tmp_path / "new" / "place").iterdir())) == 2
        for info in store.list():
            storage.storage_at(url).remove(info.name)
        assert list((tmp_path / "new" / "place").iterdir()) == []


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("place", ["", "folders://"])
def test_what_is_no_file_is_damage(tmp_path: Path, place: str, kind: str) -> None:
    """Nobody waits for a pipe that nobody writes to, or reads a device without end."""
    fsspec.register_implementation("folders", FilesInFolders, clobber=True)
    store = stored(f"{place}{tmp_path}", 1, 2, 3)
    put(kind, folder_of(tmp_path, 3) / MANIFEST)
    put(kind, folder_of(tmp_path, 2) / "model.safetensors")
    found = store.load_newest()
    assert found is not None
    assert found.info.manifest.step == 1
    manifest, model = (each.problem for each in found.skipped)
    if kind == "endless":
        assert manifest == f"{MANIFEST}: more than {LIMIT} bytes"
        assert model.startswith("model.safetensors: more than ")
    else:
        assert (manifest, model) == (f"{MANIFEST}: not a regular file", "model.safetensors: not a regular file")


def test_a_link_that_leads_to_itself_is_damage(tmp_path: Path) -> None:
    """The newest that can be read is used; a file system that fails would be another matter."""
    store = stored(str(tmp_path), 1, 2, 3)
    for step, name in ((3, MANIFEST), (2, "model.safetensors")):
        link = folder_of(tmp_path, step) / name
        link.unlink()
        link.symlink_to(link)
    found = store.load_newest()
    assert found is not None
    assert found.info.manifest.step == 1
    loop = "a link that leads to itself"
    assert [each.problem for each in found.skipped] == [f"{MANIFEST}: {loop}", f"model.safetensors: {loop}"]


def test_a_mark_that_is_no_file_is_an_error(tmp_path: Path) -> None:
    """That says which."""
    put("fifo", tmp_path / storage.IDENTITY_FILE)
    with pytest.raises(FileExistsError, match=storage.IDENTITY_FILE):
        storage.storage_at(str(tmp_path)).identity()


def test_an_unknown_protocol_is_refused() -> None:
    """With the URL."""
    with pytest.raises(SpecError, match=r"URL: got 'gopher://a/b'"):
        stored("gopher://a/b").check()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the extra that brings it."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(import_module("fsspec.registry")._registry, "s3", raising=False)  # another test has it
    with pytest.raises(
        MissingExtraError, match=r"s3://bucket/job needs the extra s3 \(pip install 'edl-airflow\[s3\]'\)"
    ):
        stored("s3://bucket/job").check()


def test_arrays_that_can_not_be_stored_are_refused(tmp_path: Path) -> None:
    """And leave nothing behind."""
    snapshot = msgspec.structs.replace(snapshot_at(1), arrays={"model": {"names": np.array(["a"])}})
    with pytest.raises(SpecError, match="'names'"):
        stored(tmp_path).write(snapshot)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_fails_at_the_last_file_may_have_stored_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an object store that answers neither the last write nor the removal: the checkpoint can be loaded."""
    draft = storage.ObjectStorage.draft

    @contextlib.contextmanager
    def without_an_answer(objects: storage.ObjectStorage, folder: str) -> Iterator[storage.CreateFile]:
        @contextlib.contextmanager
        def create(file: str) -> Iterator[BinaryIO]:
            with create_there(file) as out:
                yield out
            if file in (MANIFEST, *lost):
                raise PermissionError("no answer")

        with draft(objects, folder) as create_there:
            yield create

    def refuse(*_: object) -> None:
        raise PermissionError("no answer")

    monkeypatch.setattr(storage.ObjectStorage, "draft", without_an_answer)
    monkeypatch.setattr(storage.ObjectStorage, "remove", refuse)
    for lost, whole in ((["extra.json"], []), ([], [1])):
        store = stored(f"memory://at-the-end-{len(lost)}")
        with pytest.raises(CheckpointStoreError, match="no answer"):
            store.write(snapshot_at(1))
        found = store.load_newest()
        assert ([] if found is None else [found[1].step]) == whole
        assert found is None or is_whole(found[1])


@pytest.mark.slow
def test_temporary_errors_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few times; a full disk is not temporary."""
    tries: list[int] = []

    def fail(*_: object) -> None:
        tries.append(1)
        raise OSError(troubles.pop(0), "no")

    monkeypatch.setattr(file_format, "write_checked", fail)
    troubles = [errno.ENOSPC]
    with pytest.raises(CheckpointStoreError, match="no"):
        stored(tmp_path).write(snapshot_at(1))
    assert len(tries) == 1
    troubles = [errno.ETIMEDOUT]
    monkeypatch.setattr(file_format, "write_checked", lambda *args: fail() if troubles else write_checked(*args))
    assert is_whole(stored(tmp_path).load(stored(tmp_path).write(snapshot_at(1))))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_piece_that_can_not_be_had_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that read: a large checkpoint takes long, and each read may fail once."""
    answers: list[None] = []
    stored(tmp_path, 1)
    store = CheckpointStore(Checkpoint(url=str(tmp_path)), answered=lambda: answers.append(None))
    monkeypatch.setattr(file_format, "CHUNK_BYTES", 128)
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
    """Even if older ones are removed meanwhile, or one is unfinished."""
    store = stored(tmp_path, 1, 2, 3)
    known = store.load_newest()
    unfinished = Path(store.list()[-1].url).rename(tmp_path / "step-000000004-gen-000001-0a1b2c3d")
    (unfinished / MANIFEST).rename(tmp_path / "kept.json")
    with monkeypatch.context() as patched:
        patched.setattr(file_format, "read_checked", None)
        assert store.load_newest(known) is known
    stored(tmp_path, 5)
    found = store.load_newest(known)
    assert found is not None
    assert found[1].step == 5
