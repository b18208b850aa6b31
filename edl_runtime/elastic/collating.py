"""Samples to batches, as paddle.io.DataLoader makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Collate = Callable[[list[Any]], Any]


def as_tensors(batch: Any) -> Any:
    """Return a batch with tensors for its arrays, as paddle.io.DataLoader does."""
    match batch:
        case np.ndarray():
            import paddle

            return paddle.to_tensor(batch)
        case list() | tuple():
            return [as_tensors(slot) for slot in batch]
        case dict():
            return {name: as_tensors(slot) for name, slot in batch.items()}
    return batch


def default_collate(samples: list[Any]) -> Any:
    """Return the samples' slots, each stacked."""
    from paddle.io.dataloader.collate import default_collate_fn

    return default_collate_fn(samples)  # type: ignore[no-untyped-call]
