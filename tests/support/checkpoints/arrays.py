"""Arrays of all kinds that a checkpoint can hold."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

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
