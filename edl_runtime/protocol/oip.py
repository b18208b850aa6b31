"""The data types of the Open Inference Protocol v2 that teachers and students exchange.

https://github.com/kserve/open-inference-protocol and Triton's binary tensor extension.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Datatype = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BF16",
    "BYTES",
]


def fits(shape: tuple[int, ...], allowed: tuple[int, ...]) -> bool:
    """Whether an array of `shape` is one of `allowed`, where -1 is any size."""
    return shape == allowed or (
        len(shape) == len(allowed) and all(size in (have, -1) for have, size in zip(shape, allowed, strict=True))
    )


class TensorSpec(msgspec.Struct, frozen=True):
    """One input or output of a model; -1 in `shape` is any size, and the first axis is the batch."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]


class ModelSignature(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes and answers, as OIP's model metadata. `versions` has one entry, a digest of the model."""

    name: str
    versions: tuple[str, ...] = ()
    platform: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
