"""Arrays to safetensors and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import load, save, save_file

from edl_runtime.checkpoint.tensors import parse, pieces
from edl_runtime.errors import SpecError

DTYPES = [np.dtype(name) for name in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", "c8")]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__")
SHAPES = array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
SOME = st.dictionaries(NAMES, st.sampled_from(DTYPES).flatmap(lambda dtype: arrays(dtype, SHAPES)), max_size=5)


def encoded(given_arrays: dict[str, np.ndarray]) -> bytes:
    return b"".join(pieces(given_arrays))


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()  # not a number is itself here


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
    with pytest.raises(SpecError, match=r"'names'.*allowed is arrays of F64"):
        encoded({"names": np.zeros(2, dtype)})


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
