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
    flat = array.reshape(-1, size)
    row = np.arange(len(flat))[:, None]
    indices = np.argpartition(flat, size - k, axis=1)[:, size - k :]
    indices = indices[row, np.argsort(flat[row, indices], axis=1)[:, ::-1]]
    shape = (*array.shape[:-1], k)
    return flat[row, indices].reshape(shape), indices.astype(np.int32).reshape(shape)
