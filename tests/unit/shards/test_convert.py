"""Readers, and the places that shards are written to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl_runtime.checkpoint.storage import LocalStorage
from edl_runtime.errors import SpecError
from edl_runtime.shards.convert import convert, load_reader
from edl_runtime.shards.dataset import list_shards, read_shard
from edl_runtime.shards.errors import ConversionRunningError, DatasetStoreError, ReaderError

pytest.importorskip("pyarrow")


def numbers(count: int = 3) -> Iterator[tuple[int]]:
    return ((number,) for number in range(count))


def records(url: str) -> list[int]:
    return [number for shard in list_shards(url) for (number,) in read_shard(shard)]


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "train" / "out")


@pytest.mark.parametrize(
    "reader", [numbers, lambda: numbers, lambda: list(numbers()), lambda: lambda: map(list, numbers())]
)
def test_readers_have_the_forms_of_paddle(out: str, reader: Callable[[], Any]) -> None:
    """A generator function, a function that returns one, and lists of samples or fields."""
    convert(reader, out, records_per_shard=2)
    assert records(out) == [0, 1, 2]


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (5, [5]), (6, [5, 1]), (10, [5, 5])])
def test_shards_have_as_many_records_as_asked_for(out: str, count: int, sizes: list[int]) -> None:
    """But the last one; their names have the same order as the samples."""
    made = convert(lambda: numbers(count), out, records_per_shard=5)
    assert list(made.shards.values()) == sizes
    assert [Path(shard).name for shard in list_shards(out)] == sorted(made.shards) == list(made.shards)
    assert records(out) == list(range(count))


def test_the_same_samples_make_the_same_shards(tmp_path: Path) -> None:
    """Their names too, so a training may go on with another copy at the same place."""
    made = [convert(numbers, str(tmp_path / name), records_per_shard=2) for name in "ab"]
    assert made[0] == made[1]


def test_a_reader_may_use_its_arrays_again(out: str) -> None:
    """Each sample is as it was when it was yielded: the array, the list, and the list that is the sample."""

    def reusing() -> Iterator[list[Any]]:
        array, numbers = np.zeros(2, np.float32), [0]
        sample: list[Any] = [array, numbers, 0]
        for number in range(3):
            array[:] = numbers[0] = sample[2] = number
            yield sample

    convert(reusing, out, records_per_shard=3)
    (shard,) = list_shards(out)
    assert [(*array, *some, number) for array, some, number in read_shard(shard)] == [(n,) * 4 for n in range(3)]


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    """To one with shards, which are replaced, and to one that is not there yet; the link stays."""
    for name in ("here", "there"):
        (tmp_path / f"to-{name}").symlink_to(name)
    convert(numbers, str(tmp_path / "here"), records_per_shard=2)
    for name in ("here", "there"):
        convert(lambda: numbers(5), str(tmp_path / f"to-{name}"), records_per_shard=2, overwrite=True)
        assert records(str(tmp_path / name)) == records(str(tmp_path / f"to-{name}")) == [0, 1, 2, 3, 4]


def test_a_place_has_one_conversion_at_a_time(out: str) -> None:
    """A second one fails with the cause, before it reads anything, and changes nothing of what the first writes."""

    def disturbed() -> Iterator[tuple[int]]:
        yield from numbers(4)
        with pytest.raises(
            ConversionRunningError, match=f"another conversion writes shards to {out}; wait for its end"
        ):
            convert(pytest.fail, out, records_per_shard=2, overwrite=True)
        yield from numbers(1)

    convert(disturbed, out, records_per_shard=2)
    assert records(out) == [0, 1, 2, 3, 0]


def test_who_lists_shards_while_they_are_replaced_finds_a_whole_set(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the set is another one between the look at the manifest and that at the files."""
    convert(numbers, out, records_per_shard=2)
    contents = LocalStorage.contents

    def replaced_before(storage: LocalStorage, folder: str) -> set[str]:
        monkeypatch.undo()
        convert(lambda: numbers(5), out, records_per_shard=4, overwrite=True)
        return contents(storage, folder)

    monkeypatch.setattr(LocalStorage, "contents", replaced_before)
    assert records(out) == [0, 1, 2, 3, 4]


def failing() -> Iterator[tuple[int]]:
    yield from numbers()
    raise KeyError("label")


def of_a_folder(folder: str) -> list[str]:
    return [folder]


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (lambda: iter(()), "reader: got '.*', allowed is one that yields a sample or more"),
        (lambda: 7, "reader: got '.*', allowed is one that returns an iterable of samples, not int"),
        (of_a_folder, "a function that can be called without arguments; missing .*'folder'"),
        (
            failing,
            r"the reader failing failed at sample 3, counted from 0: KeyError: 'label' \(.*test_convert.py, line",
        ),
        (lambda: 1 // 0, "failed at sample 0, counted from 0: ZeroDivisionError"),
    ],
)
def test_a_reader_that_fails_leaves_nothing(tmp_path: Path, reader: Callable[[], Any], message: str) -> None:
    """Says where it failed; neither a shard nor a draft is there afterwards."""
    with pytest.raises((SpecError, ReaderError), match=message):
        convert(reader, str(tmp_path / "out"), records_per_shard=2)
    assert list(tmp_path.iterdir()) == []


def test_shards_are_replaced_only_when_asked_for(out: str) -> None:
    """At once, when the new ones are whole: until then readers have the old ones."""
    convert(numbers, out, records_per_shard=2)
    with pytest.raises(SpecError, match=r"OUT: got .*, allowed is a place without shards; --overwrite replaces"):
        convert(lambda: numbers(5), out, records_per_shard=2)

    def looking() -> Iterator[tuple[int]]:
        for number in range(5):
            assert records(out) == [0, 1, 2]
            yield (number,)

    made = convert(looking, out, records_per_shard=2, overwrite=True)
    assert records(out) == [0, 1, 2, 3, 4]
    assert {path.name for path in Path(out).iterdir()} == {*made.shards, "manifest.json"}


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_reader_that_fails_leaves_the_old_set(out: str, size: int) -> None:
    """However many shards it has filled, the same as old ones or others; nothing new is left."""
    convert(numbers, out, records_per_shard=2)
    before = {path: path.read_bytes() for path in Path(out).iterdir()}
    with pytest.raises(ReaderError):
        convert(failing, out, records_per_shard=size, overwrite=True)
    assert {path: path.read_bytes() for path in Path(out).iterdir()} == before
    assert records(out) == [0, 1, 2]


@pytest.mark.parametrize("theirs", ["notes.txt", "model.safetensors", "photos"])
def test_what_is_not_of_a_conversion_is_never_removed(tmp_path: Path, theirs: str) -> None:
    """A folder with anything else is refused, also one that has a manifest, as a checkpoint does."""
    (tmp_path / "manifest.json").touch()
    (tmp_path / theirs).mkdir() if theirs == "photos" else (tmp_path / theirs).touch()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(
        SpecError, match=r"OUT: got .*, allowed is an empty or missing folder, or one with shards and no"
    ):
        convert(numbers, str(tmp_path), records_per_shard=2, overwrite=True)
    assert sorted(tmp_path.iterdir()) == before


def test_a_place_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    """With the cause and what to do."""
    (tmp_path / "file").touch()
    with pytest.raises(DatasetStoreError, match=r"shards at .*file/out can't be written or read \(NotADirectoryError"):
        convert(numbers, str(tmp_path / "file" / "out"), records_per_shard=2)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("reader.py", "FILE.py:FUNCTION or package.module:FUNCTION"),
        ("missing.py:train", "there is no missing.py"),
        ("reader.py:test", "has no attribute 'test'"),
        ("reader.py:NUMBER", "this is int, and no function"),
        ("no_such_module_here:train", "No module named 'no_such_module_here'"),
        ("needs.py:train", "No module named 'no_such_library'"),
        ("folder.py:train", "there is no folder.py"),
    ],
)
def test_a_reader_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    """With what is missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    (tmp_path / "reader.py").write_text("NUMBER = 1\ndef train(): return []\n")
    (tmp_path / "needs.py").write_text("import no_such_library\n")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(SpecError, match=f"READER: got '{source}', allowed is .*{why}"):
        load_reader(source)


def test_a_reader_s_file_is_a_module_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dataclasses look for it by its name; an error of its own is not taken for a missing file."""
    monkeypatch.setattr("sys.path", sys.path.copy())
    file = tmp_path / "reader_with_a_dataclass.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Picture:\n    label: int\n"
        "def train(): return [(Picture(7).label,)]\n"
    )
    assert load_reader(f"{file}:train")() == [(7,)]
    file.write_text("open('/no/labels')\n")
    with pytest.raises(FileNotFoundError, match="/no/labels"):
        load_reader(f"{file}:train")
