"""The identity of a checkpoint folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from edl_runtime.checkpoint.storage import IDENTITY_FILE, storage_at


@pytest.mark.parametrize("other", ["place/", "./place", "alias", "file://{}/place", "../{0.name}/place"])
def test_other_names_of_a_folder_are_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """By a slash, a link, a URL or a relative path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alias").symlink_to("place")
    place = storage_at("place").identity()
    assert storage_at(other.format(tmp_path)).identity() == place


def test_a_folder_stays_the_same_when_it_is_used_and_moved(tmp_path: Path) -> None:
    """Writing there does not change it, nor does reading it again, nor a `touch`."""
    before = storage_at(str(tmp_path / "place")).identity()
    storage_at(str(tmp_path / "place")).check()
    os.utime(tmp_path / "place" / IDENTITY_FILE, (0, 0))
    (tmp_path / "place").rename(tmp_path / "moved")
    assert storage_at(str(tmp_path / "moved")).identity() == before


def test_a_folder_that_is_created_again_is_another(tmp_path: Path) -> None:
    """Even if its file has the inode and the time of the earlier one; an empty file gets a line."""
    mark = tmp_path / IDENTITY_FILE
    mark.touch()
    before = storage_at(str(tmp_path)).identity()
    assert storage_at(str(tmp_path)).identity() == before
    found = mark.stat()
    mark.write_bytes(b"")
    assert storage_at(str(tmp_path)).identity() != before
    os.utime(mark, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert storage_at(str(tmp_path)).identity() != before
    mark.write_bytes(bytes(5000))
    assert storage_at(str(tmp_path)).identity() == storage_at(str(tmp_path)).identity() != before


def test_a_copy_of_a_folder_is_another(tmp_path: Path) -> None:
    """Even with the times of its files; so is a folder at the path of one that was moved away."""
    places = [tmp_path / name for name in ("place", "copy", "place")]
    found = [storage_at(str(places[0])).identity()]
    shutil.copytree(places[0], places[1])
    found.append(storage_at(str(places[1])).identity())
    places[0].rename(tmp_path / "elsewhere")
    found.append(storage_at(str(places[2])).identity())
    assert len(set(found)) == 3


def test_a_place_in_an_object_store_goes_by_its_url() -> None:
    """Without a request to the store; a slash at its end does not matter."""
    names = ["s3://bucket/nightly", "s3://bucket/nightly/", "s3://bucket/nightly-2"]
    one, again, other = (storage_at(name).identity() for name in names)
    assert one == again != other
