"""Requests that run as one: which, and how they are put together and taken apart. Nothing here waits or runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.protocol.requests import InferRequest
from edl_runtime.protocol.tensors import Array, dtype_of
from edl_runtime.teacher.normalise import normalise


class Waiting(NamedTuple):
    """A request that waits for its turn. Those of equal `form` can be joined; one whose form is None runs alone."""

    slot: int
    request: InferRequest
    rows: int
    form: tuple[tuple[int, ...], ...] | None

    @classmethod
    def of(cls, slot: int, request: InferRequest, signature: ModelSignature) -> Waiting:
        """Its rows are the batch axis of its inputs, if they agree in that; dtypes are the model's in any case."""
        shapes = [request.inputs[spec.name].shape for spec in signature.inputs]
        sizes = {shape[0] if shape else 0 for shape in shapes}
        rows = max(sizes, default=0)
        alike = len(sizes) == 1 and rows > 0
        return cls(slot, request, rows, tuple(shape[1:] for shape in shapes) if alike else None)


def can_join(signature: ModelSignature) -> bool:
    """Whether the model takes and answers batches of any size."""
    tensors = [*signature.inputs, *signature.outputs]
    return bool(signature.inputs) and all(spec.shape[:1] == (-1,) for spec in tensors)


def next_group(waiting: Sequence[Waiting], most_rows: int) -> list[Waiting]:
    """Return the first of `waiting` and those of its form to run with it, in order, together at most `most_rows` rows.

    A group has the rows of its first times a power of two, so that few batch sizes occur: a new size costs Paddle up to
    five runs' time, and it remembers ten. Others wait for the next run, at most as long as this one.
    """
    first = waiting[0]
    group, rows, whole = [first], first.rows, 1
    if first.form is None:
        return group
    for one in waiting[1:]:
        if one.form != first.form:
            continue
        rows += one.rows
        if rows > most_rows:
            break
        group.append(one)
        times, rest = divmod(rows, first.rows)
        if not rest and times.bit_count() == 1:
            whole = len(group)
    return group[:whole]


def needed_outputs(requests: Iterable[InferRequest]) -> list[str]:
    """Return the outputs of the model that these requests' answers are made of."""
    wishes = (wish for request in requests for wish in request.wishes)
    return list(dict.fromkeys(wish if isinstance(wish, str) else wish.name for wish in wishes))


def joined_inputs(requests: Sequence[InferRequest], signature: ModelSignature) -> dict[str, Array]:
    """Return what the model takes for all these requests, joined along the batch axis; of one alone without a copy.

    All of it is read-only.
    """
    inputs = {spec.name: _joined(requests, spec) for spec in signature.inputs}
    for array in inputs.values():
        array.flags.writeable = False
    return inputs


def _joined(requests: Sequence[InferRequest], spec: TensorSpec) -> Array:
    arrays = [request.inputs[spec.name] for request in requests]
    first = arrays[0]
    if len(requests) == 1 and spec.name not in requests[0].normalise:
        return first
    whole = np.empty((sum(len(array) for array in arrays), *first.shape[1:]), dtype_of(spec.datatype))
    start = 0
    for request, array in zip(requests, arrays, strict=True):
        part = whole[start : start + len(array)]
        how = request.normalise.get(spec.name)
        if how is None:
            part[...] = array
        else:
            normalise(array, how, out=part)
        start += len(array)
    return whole


def split_outputs(outputs: Mapping[str, Array], rows: Sequence[int]) -> list[dict[str, Array]]:
    """Return each request's part of the outputs of a joined run. Raises ValueError for one that has not all rows."""
    total = sum(rows)
    for name, array in outputs.items():
        if not array.ndim or len(array) != total:
            raise ValueError(f"output {name!r} has shape {list(array.shape)} for {total} rows")
    parts = []
    start = 0
    for size in rows:
        parts.append({name: array[start : start + size] for name, array in outputs.items()})
        start += size
    return parts
