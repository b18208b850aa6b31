"""What is wished for of outputs: all of one, or the largest of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from edl_runtime.errors import ProtocolError
from edl_runtime.protocol.oip import TopK, answered_names
from edl_runtime.protocol.tensors import Array


def wished(outputs: Mapping[str, Array], wishes: Iterable[str | TopK]) -> dict[str, Array]:
    """Return the tensors, by the names they are answered under, that `wishes` ask for of what a model gave.

    Raises ProtocolError for an output that has not so many as are wished for, KeyError for one that is not there.
    """
    tensors: dict[str, Array] = {}
    for wish in wishes:
        if isinstance(wish, str):
            tensors[wish] = np.asarray(outputs[wish])
            continue
        try:
            largest = top_k(np.asarray(outputs[wish.name]), wish.k)
        except ProtocolError as error:
            raise ProtocolError(f"output {wish.name!r}: {error}") from None
        tensors.update(zip(answered_names(wish), largest, strict=True))
    return tensors


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
