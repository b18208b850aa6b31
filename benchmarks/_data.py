"""Synthetic data in shapes of distillation jobs; every sample is a fresh copy, as a decoder would make it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.protocol.tensors import datatype_of

LOGITS = 10

Array = npt.NDArray[Any]


class Data(NamedTuple):
    """A kind of data: the `inputs` of a sample, whether it has a label behind them, and batches in one epoch."""

    inputs: dict[str, Array]
    labelled: bool
    batches: int

    @property
    def names(self) -> list[str]:
        return [*self.inputs, *(["label"] if self.labelled else [])]

    def of(self, dtype: str) -> Data:
        """Return the data with inputs of another dtype."""
        return self._replace(inputs={name: array.astype(dtype) for name, array in self.inputs.items()})

    @property
    def signature(self) -> ModelSignature:
        inputs = [TensorSpec(name, datatype_of(one.dtype), (-1, *one.shape)) for name, one in self.inputs.items()]
        return ModelSignature(
            name="teacher",
            versions=("1",),
            platform="instant",
            inputs=tuple(inputs),
            outputs=(TensorSpec("logits", "FP32", (-1, LOGITS)),),
        )

    def source(self, format: str, batches: int, batch_size: int) -> Callable[[], Iterator[Any]]:  # noqa: A002
        """Return a source of `batches` batches in a format of the reader."""
        label = (np.int64(7),) if self.labelled else ()
        inputs = list(self.inputs.values())
        whole = [np.repeat(np.asarray(slot)[None], batch_size, axis=0) for slot in (*inputs, *label)]

        def samples() -> Iterator[Any]:
            for _ in range(batches * batch_size):
                yield (*[slot.copy() for slot in inputs], *label)

        def sample_lists() -> Iterator[Any]:
            for _ in range(batches):
                yield [(*[slot.copy() for slot in inputs], *label) for _ in range(batch_size)]

        def whole_batches() -> Iterator[Any]:
            for _ in range(batches):
                yield tuple([slot.copy() for slot in whole])

        return {"sample": samples, "sample_list": sample_lists, "batch": whole_batches}[format]


DATA = {
    "img224": Data({"image": np.zeros((3, 224, 224), np.float32)}, labelled=True, batches=100),
    "img28": Data({"image": np.zeros((1, 28, 28), np.float32)}, labelled=True, batches=3000),
    "tok128": Data({f"tokens_{n}": np.zeros(128, np.int64) for n in range(4)}, labelled=False, batches=3000),
}
