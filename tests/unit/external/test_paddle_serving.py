"""What pipelines of Paddle Serving print."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from edl_runtime.external.paddle_serving import array_of_text
from edl_runtime.protocol.errors import ProtocolError

FLOAT32 = np.dtype(np.float32)


@given(
    npst.arrays(
        np.float32,
        npst.array_shapes(max_dims=4, max_side=5),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
@example(np.array([0.00012345678], np.float32))
def test_what_numpy_prints_is_read(array: np.ndarray) -> None:
    """As near as eight digits after the point are: without an exponent they are fewer of a small number."""
    with np.printoptions(threshold=10**6):
        text = repr(array)
    read = array_of_text("y", text, FLOAT32)
    assert read.shape == array.shape
    np.testing.assert_allclose(read, array, rtol=1e-6, atol=0.0 if "e-" in text or "e+" in text else 6e-9)


@given(npst.arrays(np.int64, npst.array_shapes(max_dims=3, max_side=4)))
def test_whole_numbers_are_read_exactly(array: np.ndarray) -> None:
    with np.printoptions(threshold=10**6):
        assert np.array_equal(array_of_text("y", repr(array), array.dtype), array)
    assert np.array_equal(array_of_text("y", str(array.tolist()), array.dtype), array)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[]]",
        "[1, 2",
        "[[1, 2], [3]]",
        "[1][2]",
        "array([1, nan])",
        "array(['a'])",
        "[1, __import__('os')]",
        "[" * 40 + "1" + "]" * 40,
        "[1e999e9]",
        "[--1]",
        "array([1., ..., 2.])",
        pytest.param(f"[1]{' ' * 1_000_000}x", id="many spaces"),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    """And evaluated nowhere."""
    with pytest.raises(ProtocolError, match="'y'"):
        array_of_text("y", text, FLOAT32)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ProtocolError):
        array_of_text("y", "[300]", np.dtype(np.uint8))
