"""A GPU for machines without one: where parameters are on it, and a ProcessGroupNCCL that takes what Paddle's takes."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about a compiler cache
    from paddle.base import core

ON_GPU = property(lambda _: SimpleNamespace(is_cpu_place=lambda: False, is_gpu_place=lambda: True))
"""In place of `paddle.base.framework.EagerParamBase.place`: as if all parameters were on a GPU."""


class FakeNccl:
    """A group that gloo sums for. `error`: what each sum fails with, None for nothing."""

    error: Exception | None = None

    def __init__(self, store: Any, rank: int, world_size: int, group_id: int) -> None:
        self._gloo: Any = None
        self._arguments = store, rank, world_size, group_id

    @classmethod
    def create(  # noqa: PLR0917 -- as the binding does
        cls,
        store: Any,
        rank: int,
        world_size: int,
        group_id: int,
        timeout: int,
        nccl_comm_init_option: int,
        nccl_config: None,
    ) -> FakeNccl:
        """Take seven parameters, as in process_group_nccl.h of Paddle 3.3.0 and 3.3.1.

        Raises TypeError as pybind11 does for values that it can't convert, such as a number for a shared_ptr.
        """
        numbers = (rank, world_size, group_id, timeout, nccl_comm_init_option)
        if not (all(isinstance(each, int) for each in numbers) and nccl_config is None):
            raise TypeError("create(): incompatible function arguments. The following argument types are supported:")
        return cls(store, rank, world_size, group_id)

    def allreduce(self, values: Any) -> Any:
        """Sum a tensor. The ranks meet at the first sum, as in Paddle, so that is what fails where they can't."""
        if self.error:
            raise self.error
        self._gloo = self._gloo or core.ProcessGroupGloo.create(*self._arguments)
        return self._gloo.allreduce(values)
