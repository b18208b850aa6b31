"""The fields of samples as columns of Arrow, and back."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from edl_runtime.shards.errors import SampleError

if TYPE_CHECKING:
    import pyarrow as pa

PLAIN = (bool, int, float, str, bytes)
"""Python's types that a field may have, also in lists of one type, which may differ in length."""

ALLOWED = (
    "bool, int, float, str, bytes, a list of one of these that is not empty in the first sample, a number of numpy, or "
    "an array of numbers that is not empty, has less than 256 MiB, and has the same shape in all samples"
)

MOST_BYTES = 8
"""Of a number; longer ones differ between machines."""

MOST_ARRAY_BYTES = 2**28 - 1
"""Of Arrow, which counts the bits of a value of fixed length as it reads its schema."""

_METADATA = b"edl_field"


class Field(msgspec.Struct, frozen=True):
    """What a field of every sample is: values of one type of `PLAIN`, lists of them, or numpy's.

    - `type`: a name as "int", or a dtype as "<f4".
    - `shape`: of arrays; empty for a single number.
    """

    type: str
    shape: tuple[int, ...] = ()
    is_list: bool = False

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The dtype of numpy's; None for types of Python."""
        return None if self.type in _PLAIN_NAMES else np.dtype(self.type)

    @property
    def value_bytes(self) -> int:
        """How many bytes a value has; of a list, each of its elements; of a text, the reference to it."""
        return math.prod(self.shape) * np.dtype(self.type).itemsize if self.shape else 8

    def __str__(self) -> str:
        if self.dtype is None:
            return f"list of {self.type}" if self.is_list else self.type
        return f"{self.dtype.name} {list(self.shape)}" if self.shape else f"a number of numpy, {self.dtype.name}"


_PLAIN_NAMES = {kind.__name__ for kind in PLAIN}
_SINGLE: dict[type, Field] = {kind: Field(kind.__name__) for kind in PLAIN}
_LISTS: dict[type, Field] = {kind: Field(kind.__name__, is_list=True) for kind in PLAIN}
_array = functools.lru_cache(maxsize=64)(Field)


def field_of(value: object) -> Field | None:
    """Return the field of a value, None if shards can't hold it or it is an empty list."""
    if found := _SINGLE.get(type(value)):
        return found
    if isinstance(value, list):
        kinds = set(map(type, value))
        return _LISTS.get(kinds.pop()) if len(kinds) == 1 else None
    if not isinstance(value, np.ndarray | np.generic) or isinstance(value, np.ma.MaskedArray):
        return None
    fits = 0 < value.nbytes <= MOST_ARRAY_BYTES and _is_number(value.dtype)
    return _array(value.dtype.str, value.shape) if fits else None


def fields_of(sample: object) -> list[Field]:
    """Return the fields of the first sample. Raises SampleError."""
    if not isinstance(sample, tuple | list) or not sample:
        raise SampleError(0, None, described(sample), "a tuple with a value for each field")
    fields = []
    for number, value in enumerate(sample):
        field = field_of(value)
        if field is None:
            raise SampleError(0, number, described(value), ALLOWED)
        fields.append(field)
    return fields


def check(sample: object, fields: Sequence[Field], number: int) -> None:
    """Raise SampleError unless a sample has these fields."""
    if not isinstance(sample, tuple | list) or len(sample) != len(fields):
        given = f"{len(sample)} fields" if isinstance(sample, tuple | list) else described(sample)
        raise SampleError(number, None, given, f"{len(fields)} fields, as in sample 0")
    for place, (value, field) in enumerate(zip(sample, fields, strict=True)):
        if field_of(value) != field and not (field.is_list and value == []):
            raise SampleError(number, place, described(value), f"{field}, as in sample 0")


def described(value: object) -> str:
    """Return what a value is, for messages."""
    if field := field_of(value):
        return str(field)
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        return f"{value.dtype.name} {list(value.shape)}"
    if isinstance(value, list):
        kinds = sorted({type(each).__name__ for each in value})
        return f"list of {' and '.join(kinds)}" if value else "an empty list"
    return type(value).__name__


def schema_of(fields: Sequence[Field]) -> pa.Schema:
    """Return the schema of shards with these fields. Columns are named by their numbers."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field(str(number), _arrow_type(field), nullable=False, metadata={_METADATA: msgspec.json.encode(field)})
            for number, field in enumerate(fields)
        ]
    )


def fields_in(schema: pa.Schema) -> list[Field]:
    """Return the fields of a schema. Raises ValueError or TypeError if it is not from `schema_of`."""
    if any(_METADATA not in (column.metadata or {}) for column in schema):
        raise ValueError("its columns do not say which fields they are")
    found = [msgspec.json.decode(column.metadata[_METADATA], type=Field) for column in schema]
    for field in found:
        if min(field.shape, default=1) < 1 or field.value_bytes > MOST_ARRAY_BYTES:
            raise ValueError(f"a field has shape {list(field.shape)}")
    if not schema.equals(schema_of(found)) or not all(_is_number(each.dtype) for each in found if each.dtype):
        raise ValueError("its columns are not of the fields that they say")
    return found


def to_column(field: Field, values: Sequence[Any], place: int, first: int) -> pa.Array:
    """Return the column of field number `place` of samples from number `first` on. Raises SampleError."""
    import pyarrow as pa

    kind = _arrow_type(field)
    if field.shape:
        content = np.ascontiguousarray(np.stack(values, dtype=field.dtype))
        return pa.FixedSizeBinaryArray.from_buffers(kind, len(values), [None, pa.py_buffer(content)])
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        if len(values) == 1:
            raise SampleError(
                first, place, repr(values[0])[:100], f"what Arrow can hold as {kind} ({error})"
            ) from error
        for number, value in enumerate(values):
            to_column(field, [value], place, first + number)
        raise


def from_column(field: Field, column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column; arrays are views of one new array, and may be written to."""
    whole = column.combine_chunks()
    if field.dtype is None:
        return _plain_values(whole)
    if not field.shape:
        return list(whole.to_numpy(zero_copy_only=False))
    flat = np.frombuffer(whole.buffers()[1], np.uint8)
    start = whole.offset * whole.type.byte_width
    part = flat[start : start + len(whole) * whole.type.byte_width]
    return list(part.copy().view(field.dtype).reshape(len(whole), *field.shape))


def _plain_values(column: pa.Array) -> list[Any]:
    """Return the values of a column; those that it has in a dictionary are the same objects wherever they occur."""
    import pyarrow as pa

    if isinstance(column, pa.ListArray):
        inner, ends = _plain_values(column.flatten()), np.cumsum(column.value_lengths()).tolist()
        return [inner[begin:end] for begin, end in itertools.pairwise([0, *ends])]
    if isinstance(column, pa.DictionaryArray):
        words = column.dictionary.to_pylist()
        return [words[index] for index in column.indices.to_pylist()]
    values: list[Any] = column.to_pylist()
    return values


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biuf" and dtype.itemsize <= MOST_BYTES


def _arrow_type(field: Field) -> pa.DataType:
    import pyarrow as pa

    if field.dtype is not None:
        if field.shape:
            return pa.binary(field.value_bytes)  # as a list it is several times slower
        return pa.from_numpy_dtype(field.dtype)
    kinds = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bytes": pa.binary()}
    return pa.list_(kinds[field.type]) if field.is_list else kinds[field.type]
