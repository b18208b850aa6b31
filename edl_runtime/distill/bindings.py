"""Which slots of an item become model inputs, and which outputs are requested; checked against the model signature."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from edl_runtime.distill.errors import SampleError
from edl_runtime.errors import SpecError
from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.oip import (
    JOIN_EXTENSION,
    ModelSignature,
    Normalise,
    TensorSpec,
    TopK,
    response_names,
    shape_fits,
)
from edl_runtime.protocol.tensors import Array, Tensor, dtype_of

Answers = Mapping[str, Array]
SlotArrays = tuple[Array, ...]

SMALL_ROW_BYTES = 16 * 1024
"""Bytes up to which copying rows into one array is cheaper than handing the system a pointer to each (measured)."""

_SHAPE = attrgetter("shape")
_DTYPE = attrgetter("dtype")

SampleName = Callable[[int], str]
"""Returns the name of a row's sample, for messages."""


class Tokenizer(NamedTuple):
    """The student's tokenizer file, and the digest of its content."""

    file: Path
    digest: str


class InputBinding(NamedTuple):
    """A slot of an item that is a model input: `shape` is that of a row, -1 in it is any size."""

    slot: int
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, slot: int, spec: TensorSpec, *, as_uint8: bool) -> Self:
        return cls(slot, spec.name, dtype_of("UINT8" if as_uint8 else spec.datatype), spec.shape[1:])

    def rows(self, rows: Sequence[Array], where: SampleName) -> Tensor:
        """Return the rows in the model's shape, small ones as one array. Raises SampleError."""
        fitting = self._fitting_rows(rows, where)
        if not fitting or fitting[0].nbytes > SMALL_ROW_BYTES:
            return fitting
        try:
            # Keeps the GIL, which np.stack releases for every row: each time a worker would wake up for nothing.
            joined = b"".join(fitting)  # type: ignore[arg-type]  # arrays are buffers
        except TypeError:  # of rows that are not contiguous
            return np.stack(fitting)
        return np.frombuffer(joined, self.dtype).reshape(len(fitting), *fitting[0].shape)

    def _fitting_rows(self, rows: Sequence[Array], where: SampleName) -> Sequence[Array]:
        if set(map(_SHAPE, rows)) == {self.shape} and set(map(_DTYPE, rows)) == {self.dtype}:
            return rows
        fitting = [self._fitting(row, row.shape, where(number)) for number, row in enumerate(rows)]
        for number, row in enumerate(fitting):
            if row.shape != fitting[0].shape:
                allowed = f"rows of one shape in a batch, {list(fitting[0].shape)} as in the first"
                raise SampleError(self.name, where(number), _array_text(row.dtype, row.shape), allowed)
        return fitting

    def array(self, batch: Array, position: str) -> Array:
        """Return an array of rows in the model's shape. Raises SampleError."""
        return self._fitting(batch, batch.shape[1:], position, (len(batch),))

    def _fitting(self, given: Array, row: tuple[int, ...], position: str, axes: tuple[int, ...] = ()) -> Array:
        if given.dtype == self.dtype:
            if _fits(row, self.shape):
                return given
            if min(self.shape, default=1) >= 0 and math.prod(row) == math.prod(self.shape):
                return given.reshape(*axes, *self.shape)
        raise SampleError(self.name, position, _array_text(given.dtype, row), _array_text(self.dtype, self.shape))


class OutputBinding(NamedTuple):
    """An array of the answers: `shape` is that of a row, -1 in it is any size."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def each(cls, output: str | TopK, spec: TensorSpec) -> list[Self]:
        """Return the arrays that answer a requested output. Raises SpecError."""
        dtype, shape = dtype_of(spec.datatype), spec.shape[1:]
        if isinstance(output, str):
            return [cls(output, dtype, shape)]
        if not shape or 0 <= shape[-1] < output.k:
            allowed = (
                f"at most {shape[-1]}, the last axis of it" if shape else "an output with an axis behind the batch"
            )
            raise SpecError(f"outputs: k of TopK({output.name!r})", output.k, allowed)
        values, indices = response_names(output)
        shape = (*shape[:-1], output.k)
        return [cls(values, dtype, shape), cls(indices, np.dtype(np.int32), shape)]

    def empty(self) -> Array:
        return np.empty((0, *(max(size, 0) for size in self.shape)), self.dtype)


class RequestPlan(NamedTuple):
    """What is requested from the teachers of a pool, for each item.

    - `slots`: the names of an item's slots.
    - `inputs`: what is sent; those in `normalise` as uint8, which the teachers convert to the model's FP32.
    - `requested`: the requested outputs; `outputs`: the arrays that answer them, in order.
    - `allow_nan`: whether answers may have NaN or infinity.
    - `joins`: whether requests may be joined, since an answer to a row does not depend on others. False for an output
      with a free axis: for one such as x @ x.T, the other rows may change its size or meaning.
    """

    slots: tuple[str | None, ...]
    inputs: tuple[InputBinding, ...]
    normalise: Mapping[str, Normalise]
    requested: tuple[str | TopK, ...]
    outputs: tuple[OutputBinding, ...]
    allow_nan: bool
    joins: bool

    @property
    def slots_text(self) -> str:
        return f"{len(self.slots)} slots: {', '.join(name or 'one without name' for name in self.slots)}"

    @classmethod
    def of(
        cls,
        inputs: Sequence[str | None],
        outputs: Sequence[str | TopK],
        normalise: Mapping[str, Normalise],
        signature: ModelSignature,
        *,
        allow_nan: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> Self:
        """Match a reader's arguments with the signature of the teachers' model. Raises SpecError."""
        model = f"the teachers' model {signature.name!r}"
        _check_tokenizer(tokenizer, signature.tokenizer, model)
        slots = {name: slot for slot, name in enumerate(inputs) if name}
        for spec in signature.inputs:
            if spec.name not in slots:
                allowed = f"names with {spec.name!r} among them: {model} takes it"
                raise SpecError("inputs", tuple(inputs), allowed)
        if not signature.inputs:
            raise SpecError("teachers", signature.name, "a model that takes at least one input")
        sent_as_uint8 = {spec.name: normalise[spec.name] for spec in signature.inputs if spec.name in normalise}
        for spec in signature.inputs:
            if spec.name in sent_as_uint8 and spec.datatype != "FP32":
                allowed = f"inputs that the model takes as FP32; {model} takes this one as {spec.datatype}"
                raise SpecError("normalise", spec.name, allowed)
        for used in (*sent_as_uint8, *(output for output in outputs if isinstance(output, TopK))):
            field, extension = ("outputs", "top_k") if isinstance(used, TopK) else ("normalise", "normalise")
            if extension not in signature.extensions:
                allowed = f"what the teachers can do; those of {model} ({signature.platform}) have no {extension}"
                raise SpecError(field, used, allowed)
        known = {spec.name: spec for spec in signature.outputs}
        answers: list[OutputBinding] = []
        names = [output if isinstance(output, str) else output.name for output in outputs]
        for output, name in zip(outputs, names, strict=True):
            if name not in known:
                raise SpecError("outputs", name, f"of the outputs of {model}: {', '.join(known)}")
            answers += OutputBinding.each(output, known[name])
        return cls(
            tuple(inputs),
            tuple(
                InputBinding.of(slots[spec.name], spec, as_uint8=spec.name in sent_as_uint8)
                for spec in signature.inputs
            ),
            sent_as_uint8,
            tuple(outputs),
            tuple(answers),
            allow_nan,
            joins=JOIN_EXTENSION in signature.extensions
            and all(min(known[name].shape[1:], default=0) >= 0 for name in names),
        )

    def check(self, teacher: str, answers: Answers, rows: int) -> None:
        """Raise ProtocolError unless a teacher's answers have the requested arrays of `rows` rows."""
        for name, dtype, shape in self.outputs:
            array = answers[name]
            if array.dtype != dtype or array.shape[:1] != (rows,) or not _fits(array.shape[1:], shape):
                given, allowed = _array_text(array.dtype, array.shape), _array_text(dtype, (rows, *shape))
                raise ProtocolError(f"teacher {teacher}: output {name!r} is {given}, requested was {allowed}")
            if dtype.kind == "f" and not self.allow_nan and not np.isfinite(array).all():
                raise ProtocolError(
                    f"teacher {teacher}: output {name!r} has NaN or infinity, allowed are finite numbers; "
                    "check its model and inputs, or accept them with DistillReader(allow_nan=True)"
                )


def _check_tokenizer(ours: Tokenizer | None, told: str, model: str) -> None:
    """Raise SpecError if the teachers of `model` told another digest than ours; empty is none."""
    if ours is not None and told not in ("", ours.digest):
        raise SpecError("tokenizer", f"{ours.file} (digest {ours.digest})", f"that of {model} (digest {told[:64]})")


def _fits(shape: tuple[int, ...], allowed: tuple[int, ...]) -> bool:
    return shape == allowed or shape_fits(shape, allowed)


def _array_text(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
