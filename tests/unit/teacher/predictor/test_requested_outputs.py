"""Normalisation and top-k on the teacher's side."""

from __future__ import annotations

import numpy as np
import pytest

from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.oip import Normalise
from edl_runtime.teacher.predictor.execute import normalise, top_k


@pytest.mark.parametrize("axis", [1, 2, 3])
@pytest.mark.parametrize(
    ("mean", "std"), [((3.0,), (2.0,)), ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)), ((1.0, 2.0, 3.0), (4.0,))]
)
def test_pixels_are_normalised_channel_by_channel(axis: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Wherever the channels are, to the last bit of float32."""
    shape = [2, 4, 4, 4]
    shape[axis] = 3
    pixels = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    out = np.empty(shape, np.float32)
    normalise(pixels, Normalise(mean, std, axis), out)
    last = np.moveaxis(pixels, axis, -1).astype(np.float32)
    expected = np.moveaxis((last - np.array(mean, np.float32)) / np.array(std, np.float32), -1, axis)
    assert np.array_equal(out, expected)


def test_one_number_serves_all_channels_of_a_flat_image() -> None:
    """The channel axis may be the last of two."""
    out = np.empty((2, 3), np.float32)
    normalise(np.array([[1, 2, 3], [4, 5, 6]], np.uint8), Normalise((1.0, 2.0, 3.0), (1.0,)), out)
    assert out.tolist() == [[0, 0, 0], [3, 3, 3]]


@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i8", "u1"])
@pytest.mark.parametrize("k", [1, 5, 20])
def test_the_largest_come_first_with_their_places(dtype: str, k: int) -> None:
    """Values in the output's own dtype, places in int32, along the last of any axes."""
    logits = np.random.default_rng(1).permuted(np.tile(np.arange(20), (3, 2, 1)), axis=-1).astype(dtype)
    values, indices = top_k(logits, k)
    assert (values.dtype, indices.dtype) == (np.dtype(dtype), np.dtype(np.int32))
    assert np.array_equal(values, np.tile(np.arange(19, 19 - k, -1), (3, 2, 1)))
    assert np.array_equal(np.take_along_axis(logits, indices, -1), values)


@pytest.mark.parametrize("shape", [(2, 3), (4,)])
def test_more_than_there_are_can_not_be_had(shape: tuple[int, ...]) -> None:
    """An output whose size only shows when it is there has its limit too."""
    with pytest.raises(ProtocolError, match="top_k is 4, allowed is at most"):
        top_k(np.zeros(shape), 4)
