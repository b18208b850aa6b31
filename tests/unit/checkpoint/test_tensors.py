"""Arrays to safetensors and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from safetensors.numpy import load, save, save_file
from support.checkpoints.arrays import SOME, assert_same

from edl_runtime.checkpoint.tensors import parse, pieces
from edl_runtime.errors import SpecError


def encoded(given_arrays: dict[str, np.ndarray]) -> bytes:
    return b"".join(pieces(given_arrays))


@settings(deadline=None)
@given(SOME)
def test_any_arrays_come_back_as_they_were(some: dict[str, np.ndarray]) -> None:
    """Without dimensions or without elements, booleans and half floats too: same names, types, shapes and bytes."""
    assert_same(parse(np.frombuffer(encoded(some), np.uint8)), some)


@settings(deadline=None)
@given(SOME.map(lambda some: {name: each for name, each in some.items() if each.dtype != "c8"}))
def test_the_library_and_we_read_each_other(some: dict[str, np.ndarray]) -> None:
    """The files are safetensors: whoever knows these needs nothing of ours."""
    assert_same(load(encoded(some)), some)
    assert_same(parse(np.frombuffer(save(some), np.uint8)), some)


def test_what_is_not_laid_out_in_one_piece_is_written_as_if_it_were() -> None:
    """A transposed array comes back in its own shape, with its own elements."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    found = parse(np.frombuffer(encoded({"a": array, "b": array[::2]}), np.uint8))
    assert np.array_equal(found["a"], array)
    assert np.array_equal(found["b"], array[::2])


def test_the_bytes_of_large_arrays_are_never_copied() -> None:
    """Checkpoints are as large as memory allows."""
    array = np.zeros(1000)
    assert any(np.shares_memory(np.frombuffer(piece, np.uint8), array) for piece in pieces({"a": array}))
    content = np.frombuffer(encoded({"a": array}), np.uint8)
    assert np.shares_memory(parse(content)["a"], content)


def test_bits_of_bfloat16_are_read(tmp_path: Path) -> None:
    """As uint16, which Paddle takes for bfloat16."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    save_file({"a": np.array([1.5, -2], ml_dtypes.bfloat16)}, tmp_path / "a")
    assert parse(np.fromfile(tmp_path / "a", np.uint8))["a"].tolist() == [0x3FC0, 0xC000]


@pytest.mark.parametrize("dtype", ["O", "U3", "M8[s]", ">f4", "c16"])
def test_other_arrays_are_refused_by_name(dtype: str) -> None:
    """Text or objects would need pickle."""
    with pytest.raises(SpecError, match=r"'names': got '.*', allowed is float64, "):
        encoded({"names": np.zeros(2, dtype)})


def test_the_name_that_the_format_keeps_for_itself_is_refused() -> None:
    """An array of that name would be lost."""
    with pytest.raises(SpecError, match="__metadata__"):
        encoded({"__metadata__": np.zeros(2)})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\xff" * 20,
        b'\x4f\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'\x4f\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'\x4f\0\0\0\0\0\0\0{"a":{"dtype":"Q17","shape":[1],"data_offsets":[0,4]}}0000',
    ],
)
def test_what_is_no_safetensors_file_is_refused(content: bytes) -> None:
    """By an error that says so, whatever is wrong with it."""
    with pytest.raises(ValueError, match=r"."):
        parse(np.frombuffer(content, np.uint8))
