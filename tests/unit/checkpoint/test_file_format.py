"""The files of a checkpoint: arrays as safetensors, the manifest, and the folder's name."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import load, save, save_file

from edl_runtime.checkpoint.errors import UnknownFormatError
from edl_runtime.checkpoint.file_format import (
    LATEST,
    CheckpointPosition,
    FileRecord,
    Manifest,
    is_checkpoint_name,
    new_name,
    parse_safetensors,
    position_of,
    safetensors_chunks,
)
from edl_runtime.errors import SpecError

DTYPES = [np.dtype(name) for name in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", "c8")]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SHAPES = array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
SOME = st.dictionaries(NAMES, st.sampled_from(DTYPES).flatmap(lambda dtype: arrays(dtype, SHAPES)), max_size=5)


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Fail unless these have the same names, types, shapes and bytes."""
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()  # not a number is itself here


def encoded(given_arrays: dict[str, np.ndarray]) -> bytes:
    return b"".join(safetensors_chunks(given_arrays))


@settings(deadline=None)
@given(SOME)
def test_any_arrays_come_back_as_they_were(some: dict[str, np.ndarray]) -> None:
    """Without dimensions or without elements, booleans and half floats too: same names, types, shapes and bytes."""
    assert_same(parse_safetensors(np.frombuffer(encoded(some), np.uint8)), some)


@settings(deadline=None)
@given(SOME.map(lambda some: {name: each for name, each in some.items() if each.dtype != "c8"}))
def test_the_library_and_we_read_each_other(some: dict[str, np.ndarray]) -> None:
    """The files are safetensors: other programs can read them."""
    assert_same(load(encoded(some)), some)
    assert_same(parse_safetensors(np.frombuffer(save(some), np.uint8)), some)


def test_what_is_not_laid_out_in_one_piece_is_written_as_if_it_were() -> None:
    """A transposed array comes back in its own shape, with its own elements."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    found = parse_safetensors(np.frombuffer(encoded({"a": array, "b": array[::2]}), np.uint8))
    assert np.array_equal(found["a"], array)
    assert np.array_equal(found["b"], array[::2])


def test_the_bytes_of_large_arrays_are_never_copied() -> None:
    """Checkpoints are as large as memory allows."""
    array = np.zeros(1000)
    assert any(np.shares_memory(np.frombuffer(piece, np.uint8), array) for piece in safetensors_chunks({"a": array}))
    content = np.frombuffer(encoded({"a": array}), np.uint8)
    assert np.shares_memory(parse_safetensors(content)["a"], content)


def test_bits_of_bfloat16_are_read(tmp_path: Path) -> None:
    """As uint16, which Paddle takes for bfloat16."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    save_file({"a": np.array([1.5, -2], ml_dtypes.bfloat16)}, tmp_path / "a")
    assert parse_safetensors(np.fromfile(tmp_path / "a", np.uint8))["a"].tolist() == [0x3FC0, 0xC000]


@pytest.mark.parametrize("dtype", ["O", "U3", "M8[s]", ">f4", "c16"])
def test_other_arrays_are_refused_by_name(dtype: str) -> None:
    """Text or objects would need pickle."""
    with pytest.raises(SpecError, match=r"'names': got '.*', allowed is float64, "):
        encoded({"names": np.zeros(2, dtype)})


def test_the_name_that_the_format_keeps_for_itself_is_refused() -> None:
    """An array of that name would be lost."""
    with pytest.raises(SpecError, match="__metadata__"):
        encoded({"__metadata__": np.zeros(2)})


def file_with(entry: str, data: bytes = b"", length: int = 0) -> bytes:
    """Return a file with one array, or without; its header claims to be so many bytes longer than it is."""
    header = f'{{"a":{{{entry}}}}}'.encode() if entry else b"{}"
    return (len(header) + length).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "0 bytes"),
        (file_with("")[:5], "5 bytes"),
        (file_with("", length=1), "header of 3 bytes in 10"),
        (file_with("", length=2**63), f"header of {2**63 + 2} bytes in 10"),
        (file_with("", length=2**64 - 3), f"header of {2**64 - 1} bytes in 10"),
        (b"\x02\0\0\0\0\0\0\0[]", "Expected `object`"),
        (file_with('"dtype":"F32","shape":[2],"data_offsets":[0,4]', bytes(4)), "reshape"),
        (file_with('"dtype":"F32","shape":[1],"data_offsets":[0,4]'), r"bytes 0 to 4 of 0"),
        (file_with('"dtype":"F32","shape":[1],"data_offsets":[0,8]', bytes(4)), r"bytes 0 to 8 of 4"),
        (file_with('"dtype":"F32","shape":[0],"data_offsets":[4,0]', bytes(4)), r"bytes 4 to 0 of 4"),
        (file_with('"dtype":"F32","shape":[1],"data_offsets":[-4,4]', bytes(4)), ">= 0"),
        (file_with('"dtype":"F32","shape":[-1],"data_offsets":[0,4]', bytes(4)), ">= 0"),
        (file_with('"dtype":"Q17","shape":[1],"data_offsets":[0,4]', bytes(4)), "unknown type Q17"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(content: bytes, problem: str) -> None:
    """By a ValueError that says what is wrong with it."""
    with pytest.raises(ValueError, match=problem):
        parse_safetensors(np.frombuffer(content, np.uint8))


MANIFEST = Manifest(
    format=1,
    generation=7,
    step=123,
    epoch=2,
    world_size=3,
    metrics={"loss": 0.5},
    created_at=1.5,
    files={"model.safetensors": FileRecord(8, 9)},
)


def test_a_manifest_is_read_as_it_was_written() -> None:
    """All of it."""
    assert Manifest.decode(MANIFEST.encode(), "there") == MANIFEST


def test_no_byte_of_it_can_be_another() -> None:
    """It has a check sum, too: a wrong metric or step is as bad as a wrong weight."""
    content = MANIFEST.encode()
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        try:
            found = Manifest.decode(bytes(changed), "there")
        except ValueError:
            continue
        assert found == MANIFEST


def test_another_format_is_recognized_without_its_check_sum() -> None:
    """It counts as a newer format, and not as damaged, which `prune` may remove."""
    with pytest.raises(UnknownFormatError):
        Manifest.decode(b'{"format": 2, "body": {}}', "there")


def test_no_part_of_it_is_one() -> None:
    """A torn manifest is none."""
    content = MANIFEST.encode()
    for length in range(len(content)):
        with pytest.raises(ValueError, match=r"."):
            Manifest.decode(content[:length], "there")


def test_another_format_is_refused_by_its_number() -> None:
    """One of a later version may mean something else."""
    with pytest.raises(UnknownFormatError, match=r"there .* format 2, this version reads format 1"):
        Manifest.decode(msgspec.structs.replace(MANIFEST, format=2).encode(), "there")


@pytest.mark.parametrize("created_at", [1e300, -1e18, 1e12, -1.0])
def test_a_manifest_is_of_a_time_that_can_be_shown(created_at: float) -> None:
    """Else it is damaged, and the others are shown and used."""
    with pytest.raises(ValueError, match=r"created_at is .*, allowed is a Unix time"):
        msgspec.structs.replace(MANIFEST, created_at=created_at)
    assert datetime.fromtimestamp(LATEST).astimezone()


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "model.pkl", ""])
def test_files_lie_in_the_folder(file: str) -> None:
    """A manifest names no others."""
    with pytest.raises(ValueError, match="unexpected file names"):
        msgspec.structs.replace(MANIFEST, files={file: FileRecord(1, 1)})


def test_names_tell_the_position_and_no_two_are_alike() -> None:
    """Two writers of one step never share a folder."""
    position = CheckpointPosition(generation=7, step=123)
    first, second = new_name(position), new_name(position)
    assert first != second
    assert first.startswith("step-000000123-gen-000007-")
    assert position_of(first) == position_of(second) == position
    assert position_of(new_name(CheckpointPosition(0, 10**12))) == CheckpointPosition(0, 10**12)


@pytest.mark.parametrize("folder", ["", "logs", "step-5", ".step-000000123-gen-000007-0a1b2c3d.partial"])
def test_other_folders_are_no_checkpoints(folder: str) -> None:
    """They belong to another program, or are drafts."""
    assert not is_checkpoint_name(folder)
    with pytest.raises(ValueError, match="not the name of a checkpoint"):
        position_of(folder)


def test_a_later_generation_is_newer_whatever_its_step() -> None:
    """It continued from an earlier step after an instance was lost."""
    assert CheckpointPosition(2, 10) > CheckpointPosition(1, 90)
