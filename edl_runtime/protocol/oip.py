"""The data types of the Open Inference Protocol v2 that teachers and students exchange.

https://github.com/kserve/open-inference-protocol and Triton's binary tensor extension.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, SupportsFloat, SupportsIndex

import msgspec

from edl_runtime.errors import SpecError

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


JOIN_EXTENSION = "join"
"""For models whose answer to a row does not depend on other rows: requests may be joined, to any number of rows."""

TOKENIZER_EXTENSION = "tokenizer:"
"""Followed by the digest of the file that says what a model's token numbers stand for."""

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt")
"""The names such a file has beside a model; the first that exists counts."""


def digest_of(files: Iterable[Path]) -> str:
    """Return a digest of the content of files: 16 hexadecimal digits. Raises OSError."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]


def shape_fits(shape: tuple[int, ...], allowed: tuple[int, ...]) -> bool:
    """Whether an array of `shape` is one of `allowed`, where -1 is any size."""
    return shape == allowed or (
        len(shape) == len(allowed) and all(size in (have, -1) for have, size in zip(shape, allowed, strict=True))
    )


class TensorSpec(msgspec.Struct, frozen=True):
    """One input or output of a model, its `name` and OIP's `datatype`, as "FP32".

    -1 in `shape` is any size, and the first axis is the batch.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]


class ModelSignature(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs and outputs of a model, as in OIP's model metadata. `versions` has one entry, a digest of the model.

    `extensions` are features of its teacher beyond the standard: "top_k", "normalise", "shared_memory",
    `JOIN_EXTENSION`, and `TOKENIZER_EXTENSION` with a digest.
    """

    name: str
    versions: tuple[str, ...] = ()
    platform: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    extensions: tuple[str, ...] = ()

    @property
    def tokenizer(self) -> str:
        """The digest of the model's tokenizer; empty if its teacher does not tell."""
        told = (name for name in self.extensions if name.startswith(TOKENIZER_EXTENSION))
        return next(told, "").removeprefix(TOKENIZER_EXTENSION)


class ReceivedMetadata(msgspec.Struct):
    """A model's metadata as servers send it: some send null for what they have not."""

    name: str
    versions: tuple[str, ...] | None = None
    platform: str | None = None
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    extensions: tuple[str, ...] | None = None

    def signature(self) -> ModelSignature:
        return ModelSignature(
            name=self.name,
            versions=self.versions or (),
            platform=self.platform or "",
            inputs=self.inputs or (),
            outputs=self.outputs or (),
            extensions=self.extensions or (),
        )


class TopK(msgspec.Struct, frozen=True):
    """Requests the `k` largest values of output `name` along the last axis, largest first, and their indices.

    The answer has them as `NAME.values`, in the output's own datatype, and `NAME.indices`, in INT32. Raises SpecError.
    """

    name: str
    k: int

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str) or not name:
            raise SpecError("top_k.name", name, "the name of an output")
        msgspec.structs.force_setattr(self, "k", positive_integer("top_k.k", self.k))


def response_names(output: str | TopK) -> tuple[str, ...]:
    """Return the names of the arrays that answer a requested output."""
    return (output,) if isinstance(output, str) else (f"{output.name}.values", f"{output.name}.indices")


class Normalise(msgspec.Struct, frozen=True):
    """An FP32 input that travels as UINT8: the teacher computes (x - mean) / std in float32. Raises SpecError.

    - `mean`, `std`: one number for all channels, or one for each.
    - `axis`: that of the channels, counted with the batch axis, which is 0.
    """

    mean: tuple[float, ...] | float
    std: tuple[float, ...] | float
    axis: int = 1

    def __post_init__(self) -> None:
        mean, std = _numbers("mean", self.mean), _numbers("std", self.std)
        if not all(abs(number) >= _LEAST_STD for number in std):
            raise SpecError("normalise.std", std, "numbers other than 0")
        if 1 not in (len(mean), len(std)) and len(mean) != len(std):
            raise SpecError("normalise.std", std, f"one number, or {len(mean)} as in mean")
        msgspec.structs.force_setattr(self, "axis", positive_integer("normalise.axis", self.axis, "; 0 is the batch"))
        msgspec.structs.force_setattr(self, "mean", mean)
        msgspec.structs.force_setattr(self, "std", std)

    @property
    def channels(self) -> int:
        """The number of channels that `mean` and `std` are for; 1 fits any number of channels."""
        return max(len(numbers) for numbers in (self.mean, self.std) if isinstance(numbers, tuple))  # as both are


_LEAST_STD, _MOST = 1e-37, 1e37  # what float32 can divide by and hold


def _numbers(field: str, given: Sequence[float] | float) -> tuple[float, ...]:
    try:
        if type(given) is tuple and set(map(type, given)) == {float}:  # as all that is decoded; there may be millions
            numbers = given
        else:
            numbers = tuple(map(_number, given if isinstance(given, Iterable) else [given]))
    except (TypeError, ValueError, OverflowError):
        numbers = ()
    if not numbers or not all(-_MOST <= number <= _MOST for number in numbers):  # NaN is not
        raise SpecError(f"normalise.{field}", given, "one number, or one for each channel")
    return numbers


def _number(given: object) -> float:
    if isinstance(given, str | bytes | bool) or not isinstance(given, SupportsFloat):
        raise TypeError
    return float(given)


def positive_integer(field: str, given: object, more: str = "") -> int:
    """Return a whole number of 1 or more, also one of numpy's, as an int. Raises SpecError that names `field`."""
    if isinstance(given, SupportsIndex) and not isinstance(given, bool) and (number := operator.index(given)) >= 1:
        return number
    raise SpecError(field, given, f"a whole number of 1 or more{more}")
