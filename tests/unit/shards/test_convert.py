"""Readers, and the places that shards are written to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edl_runtime.errors import SpecError
from edl_runtime.shards.convert import convert, load_reader
from edl_runtime.shards.dataset import list_shards, read_shard
from edl_runtime.shards.errors import DatasetStoreError, ReaderError

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
    """And by a reader that yields at least a shard: one that fails at once leaves the old ones."""
    convert(numbers, out, records_per_shard=2)
    with pytest.raises(SpecError, match=r"OUT: got .*, allowed is a place without shards; --overwrite replaces"):
        convert(lambda: numbers(5), out, records_per_shard=2)
    with pytest.raises(ReaderError):
        convert(failing, out, records_per_shard=5, overwrite=True)
    assert records(out) == [0, 1, 2]
    convert(lambda: numbers(5), out, records_per_shard=2, overwrite=True)
    assert records(out) == [0, 1, 2, 3, 4]


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
    with pytest.raises(SpecError, match=f"READER: got '{source}', allowed is .*{why}"):
        load_reader(source)
