"""Batches of labelled images, in another order each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Augment = Callable[[npt.NDArray[Any], np.random.Generator], npt.NDArray[Any]]


class Batches:
    """Each iteration is an epoch of shuffled images, changed by `augment`, and their labels."""

    def __init__(
        self, images: npt.NDArray[Any], labels: npt.NDArray[np.int64], batch_size: int, augment: Augment, seed: int
    ) -> None:
        self.images = images
        self.labels = labels
        self.batch_size = batch_size
        self.augment = augment
        self.rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self.labels) // self.batch_size

    def __iter__(self) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]:
        for chosen in np.split(self.rng.permutation(len(self.labels))[: len(self) * self.batch_size], len(self)):
            yield self.augment(self.images[chosen], self.rng), self.labels[chosen]
