"""The gradients of a global batch: added up over micro batches, then all-reduced over ranks as one array."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from edl_runtime.elastic.comm.process_group import ProcessGroup
from edl_runtime.elastic.training.state_parts import host_view

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_ON_HEAP = 1 << 25  # glibc's maximum
_MOST_KEPT = 1 << 30


class Gradients(Protocol):
    """The weighted sum of a step's gradients and losses.

    A parameter without a gradient counts as zero on this rank; without one on any rank it has none in the end.
    """

    def add(self, weight: float, loss: float) -> None:
        """Add the parameters' gradients times `weight`, and clear them."""
        ...

    def discard(self) -> None:
        """Drop what was added."""
        ...

    def reduce(self, group: ProcessGroup, total: float) -> float:
        """Sum over all ranks, divide by `total`, set the parameters' gradients; return the mean loss."""
        ...


class HostGradients:
    """Gradients on the CPU, in one array that is kept from step to step.

    Sums are in float32, or float64 if any gradient is. Where a parameter has the array's type its gradient is a view of
    it: nothing is copied.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        import paddle
        from paddle.utils import dlpack

        self._parameters = list(parameters)
        sizes = [int(np.prod(parameter.shape)) for parameter in self._parameters]
        double = any(parameter.dtype == paddle.float64 for parameter in self._parameters)
        more = len(sizes) + 1  # whether a rank has that gradient, and the loss
        self._flat = np.zeros(sum(sizes) + more, np.float64 if double else np.float32)
        ends = np.cumsum(sizes)
        self._views = [
            self._flat[end - size : end].reshape(parameter.shape)
            for parameter, size, end in zip(self._parameters, sizes, ends, strict=True)
        ]
        self._has = self._flat[len(self._flat) - more : -1]
        self._shared = dlpack.from_dlpack(self._flat)
        self._begun = False
        _keep_what_is_freed(2 * self._flat.nbytes)

    def add(self, weight: float, loss: float) -> None:
        if not self._begun:
            self._has[:] = 0
            self._flat[-1] = 0
        for number, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if parameter.grad is None:
                if not self._begun:
                    view[...] = 0
                continue
            if self._begun:
                np.add(view, weight * _plain(_dense(parameter)), out=view)
            else:
                np.multiply(_plain(_dense(parameter)), weight, out=view, casting="unsafe")
            self._has[number] = 1
            parameter.clear_gradient(False)
        self._flat[-1] += weight * loss
        self._begun = True

    def discard(self) -> None:
        self._begun = False

    def reduce(self, group: ProcessGroup, total: float) -> float:
        import paddle
        from paddle.utils import dlpack

        if not self._begun:
            self._flat[:] = 0
        group.all_reduce(self._shared)
        self._begun = False
        for parameter, view, has in zip(self._parameters, self._views, self._has, strict=True):
            if not has:
                continue
            np.divide(view, total, out=view)
            if parameter.dtype == self._shared.dtype:
                parameter.grad_ = dlpack.from_dlpack(view)  # which shares memory, where `grad` copies
            else:
                parameter.grad_ = paddle.to_tensor(view).astype(parameter.dtype)
        return float(self._flat[-1]) / total


class DeviceGradients:
    """Gradients on a GPU, packed at each step."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = list(parameters)
        self._sizes = [int(np.prod(parameter.shape)) for parameter in self._parameters]
        self._flat: Any = None

    def add(self, weight: float, loss: float) -> None:
        import paddle

        has = [parameter.grad is not None for parameter in self._parameters]
        pieces = [
            _dense(parameter).flatten().astype("float32") if there else paddle.zeros([size])
            for parameter, size, there in zip(self._parameters, self._sizes, has, strict=True)
        ]
        more = paddle.to_tensor([*map(float, has), loss * weight])
        flat = paddle.concat([paddle.concat(pieces) * weight, more])
        self._flat = flat if self._flat is None else self._flat + flat
        for parameter in self._parameters:
            parameter.clear_gradient(False)

    def discard(self) -> None:
        self._flat = None

    def reduce(self, group: ProcessGroup, total: float) -> float:
        import paddle

        count = len(self._sizes)
        flat = paddle.zeros([sum(self._sizes) + count + 1]) if self._flat is None else self._flat
        group.all_reduce(flat)
        self._flat = None
        *pieces, more = paddle.split(flat, [*self._sizes, count + 1])
        *has, loss = (float(value) for value in more.numpy())
        for parameter, piece, there in zip(self._parameters, pieces, has, strict=True):
            if there:
                parameter.grad_ = (piece / total).reshape(parameter.shape).astype(parameter.dtype)
        return loss / total


def any_sparse(parameters: Sequence[Any]) -> bool:
    """Whether any gradient is of some rows only, as of an Embedding(sparse=True)."""
    return any(each.grad is not None and each.grad.is_selected_rows() for each in parameters)


def _dense(parameter: Any) -> Any:
    """Return the gradient as a whole: sparse ones of other ranks have other rows, and can't be summed."""
    import paddle

    gradient = parameter.grad
    if not gradient.is_selected_rows():
        return gradient
    values, rows = gradient._get_tensor_from_selected_rows(), gradient.rows()  # noqa: SLF001 -- its own way warns
    return paddle.index_add(paddle.zeros(parameter.shape, values.dtype), paddle.to_tensor(rows), 0, values)


def _plain(gradient: Any) -> np.ndarray:
    """Return it as an array that can be weighted without loss: 16 bits may not hold the product."""
    import paddle

    is_half = gradient.dtype in (paddle.bfloat16, paddle.float16)
    return host_view(gradient.astype("float32") if is_half else gradient)


def _keep_what_is_freed(size: int) -> None:
    """Have glibc keep so many freed bytes: each step frees its gradients, and the next needs as much."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MOST_ON_HEAP)
        mallopt(_M_TRIM_THRESHOLD, min(max(size, 2 * _MOST_ON_HEAP), _MOST_KEPT))
