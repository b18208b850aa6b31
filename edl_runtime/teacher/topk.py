"""The largest of an output, in place of all of it."""

from __future__ import annotations

import numpy as np

from edl_runtime.errors import ProtocolError
from edl_runtime.protocol.tensors import Array


def top_k(array: Array, k: int) -> tuple[Array, Array]:
    """Return the `k` largest along the last axis, largest first (NaN before all), and where they stand, as int32.

    Which of several equal ones are taken is not said. Raises ProtocolError when there are fewer than `k`.
    """
    size = array.shape[-1] if array.ndim > 1 else 0
    if k > size:
        raise ProtocolError(f"top_k is {k}, allowed is at most {size}, the last axis of {list(array.shape)}")
    indices = np.argpartition(array, size - k, axis=-1)[..., size - k :]
    order = np.argsort(np.take_along_axis(array, indices, axis=-1), axis=-1)[..., ::-1]
    indices = np.take_along_axis(indices, order, axis=-1)
    return np.take_along_axis(array, indices, axis=-1), indices.astype(np.int32)
