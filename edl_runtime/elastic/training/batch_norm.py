"""The running statistics of BatchNorm layers, which are each rank's own until they are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edl_runtime.elastic.comm.process_group import ProcessGroup
from edl_runtime.elastic.training.state_parts import host_view, load_tensors, running_statistics


class RunningStatistics:
    """The running statistics of these models. Each rank's follow the batches that it has seen, which are its own."""

    def __init__(self, models: Sequence[Any]) -> None:
        found = {id(each): each for model in models for each in running_statistics(model).values()}
        self._tensors = dict(enumerate(found.values()))

    def average(self, group: ProcessGroup) -> None:
        """Set them to their means over all ranks, who have to call it together. Raises GroupLostError.

        Nothing is sent where there are none. That of a variance is the mean of the ranks' variances, without that of
        their means: batches are drawn alike, so the means differ by chance only.
        """
        if not self._tensors or group.world_size == 1:
            return
        own = [host_view(tensor) for tensor in self._tensors.values()]
        flat = np.concatenate([each.reshape(-1) for each in own], dtype=np.float64)
        group.all_reduce(flat)
        parts = np.split(flat / group.world_size, np.cumsum([each.size for each in own])[:-1])
        means = [part.reshape(each.shape).astype(each.dtype) for part, each in zip(parts, own, strict=True)]
        load_tensors(self._tensors, dict(enumerate(means)))
