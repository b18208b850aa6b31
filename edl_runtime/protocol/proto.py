"""Protobuf messages made from tables of their fields, so that neither a compiler nor generated code is needed.

A table maps a message's name to its fields, `NAME` → `NUMBER TYPE`: "5 string", "3 repeated int64", "4 map Parameter"
(from strings to messages) or a message's name as type. A field whose number is followed by "?" is one of a `oneof`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.message import DecodeError

from edl_runtime.protocol.errors import ProtocolError

Messages = Mapping[str, Mapping[str, str]]

_SCALARS: Mapping[str, Field.Type] = {
    "bool": Field.TYPE_BOOL,
    "bytes": Field.TYPE_BYTES,
    "double": Field.TYPE_DOUBLE,
    "float": Field.TYPE_FLOAT,
    "int32": Field.TYPE_INT32,
    "int64": Field.TYPE_INT64,
    "string": Field.TYPE_STRING,
    "uint32": Field.TYPE_UINT32,
    "uint64": Field.TYPE_UINT64,
}


def message_classes(package: str, messages: Messages) -> dict[str, Any]:
    """Return a class for each message of a proto3 package, by name."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, described in fields.items():
            _add_field(message, f".{package}", field, described)
    pool = descriptor_pool.DescriptorPool()  # of its own: programs may have generated code of the same package
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages}


MOST_FIELDS = 1 << 15
"""Most fields of a message and of all messages in it together; the numbers of a list count as few.

A field may be two bytes long, and take 165 bytes of memory.
"""

LISTS_LIMIT = 32 * 1024 * 1024
"""Most bytes of lists whose numbers protobuf reads one by one, for up to a second in which no other thread runs."""

_LARGEST_FIELD = 256
"""Bytes of memory that a field takes beside its content: measured 30 to 165."""

_GROWTH = 15
"""Bytes of memory that a byte of a list of whole numbers takes beside itself: measured 6 to 14.

An int64 may be one byte long, and protobuf keeps the smaller lists that it has grown out of.
"""


def parsed(message: Any, content: bytes, what: str) -> Any:
    """Return a message of the class `message`. Raises ProtocolError, which begins with `what` the bytes should be."""
    memory_of(message, content, what)
    return decoded(message, content, what)


def decoded(message: Any, content: bytes, what: str) -> Any:
    """Return what `parsed` does, of bytes that `memory_of` has looked at."""
    try:
        return message.FromString(content)
    except DecodeError as error:
        raise ProtocolError(f"{what} is no {message.DESCRIPTOR.full_name}: {error}") from None


def memory_of(message: Any, content: bytes, what: str) -> int:
    """Return about how many bytes of memory a message of the class `message` takes once it is parsed.

    It looks at each field's head alone. Raises ProtocolError, which begins with `what` the bytes should be, for more
    fields or longer lists than are allowed.
    """
    walk = _Walk(content)
    try:
        walk.through(_layout(message.DESCRIPTOR), 0, len(content))
    except _MalformedError:
        raise ProtocolError(f"{what} is no {message.DESCRIPTOR.full_name}") from None
    except _TooMuchError as error:
        raise ProtocolError(f"{what} has {error}") from None
    return len(content) + walk.fields * _LARGEST_FIELD + walk.growing * _GROWTH


def field_numbers(content: bytes, number: int) -> set[int]:
    """Return the numbers of the fields in the first message that is field `number` of `content`; empty without one."""
    walk = _Walk(content)
    try:
        inner = next((start, end) for found, start, end in walk.lengths(0, len(content)) if found == number)
        return {found for found, _, _ in walk.lengths(*inner)}
    except (StopIteration, _MalformedError, _TooMuchError):
        return set()


class _MalformedError(Exception):
    """Raised for bytes that are not in protobuf's wire format, or in a part of it that proto3 has not."""


class _TooMuchError(Exception):
    """Raised with what a message has too much of."""


class _Field(NamedTuple):
    """How the bytes of a known field are read.

    - `message`: the layout of the message that it is, None for others.
    - `run`: matches numbers of a list that follow each other, each with the field's head; None for others.
    - `grows`: whether it is a list of whole numbers, which are read one by one also where they come in one piece.
    """

    message: _Layout | None
    run: re.Pattern[bytes] | None
    grows: bool


class _Layout:
    """The known fields of a message, by number."""

    def __init__(self) -> None:
        self.fields: dict[int, _Field] = {}


_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
"""Wire types: how long a field is. https://protobuf.dev/programming-guides/encoding"""

_NUMBER = re.compile(rb"[\x80-\xff]{0,9}+[\x00-\x7f]")
_WIDTH = {_FIXED64: 8, _FIXED32: 4}
_FIXED = {Field.TYPE_FLOAT: _FIXED32, Field.TYPE_DOUBLE: _FIXED64}
_LONGEST_RUN = 1 << 16  # numbers, so that other threads run in between
_NO_NUMBERS = (Field.TYPE_MESSAGE, Field.TYPE_STRING, Field.TYPE_BYTES)


@functools.cache
def _layout(described: Any) -> _Layout:
    layout = _Layout()
    for field in described.fields:
        message = _layout(field.message_type) if field.type == Field.TYPE_MESSAGE else None
        wire_type = _FIXED.get(field.type, _VARINT)
        is_list = field.is_repeated and field.type not in _NO_NUMBERS
        run = _run(field.number, wire_type) if is_list else None
        layout.fields[field.number] = _Field(message, run, is_list and wire_type == _VARINT)
    return layout


def _run(number: int, wire_type: int) -> re.Pattern[bytes]:
    head = _encoded(number << 3 | wire_type)
    body = _NUMBER.pattern if wire_type == _VARINT else b".{%d}" % _WIDTH[wire_type]
    return re.compile(b"(?:%b%b){1,%d}+" % (re.escape(head), body, _LONGEST_RUN), re.DOTALL)


def _encoded(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _encoded(rest) if rest else bytes([low])


class _Walk:
    """Looks at the heads of a message's fields.

    `listed` are the bytes of lists that are read number by number, `growing` those of them that are whole numbers.
    """

    def __init__(self, content: bytes) -> None:
        self.fields = self.listed = self.growing = 0
        self._content = content

    def through(self, layout: _Layout, start: int, end: int) -> None:
        """Look at a message between `start` and `end`. Raises _MalformedError, _TooMuchError."""
        while start < end:
            head, begin, stop = self._field(start, end)
            field = layout.fields.get(head >> 3)
            if field is not None and head & 7 == _LENGTH:
                if field.message is not None:
                    self.through(field.message, begin, stop)
                elif field.grows:
                    self._count(field, stop - begin)
            elif field is not None and field.run and (run := field.run.match(self._content, start, end)):
                stop = run.end()
                self._count(field, stop - start)
            start = stop

    def lengths(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield number, start and end of the fields of a message; raises as `through`."""
        while start < end:
            head, begin, start = self._field(start, end)
            yield head >> 3, begin, start

    def _field(self, start: int, end: int) -> tuple[int, int, int]:
        """Return a field's head, and where its content starts and ends."""
        self.fields += 1
        if self.fields > MOST_FIELDS:
            raise _TooMuchError(f"more than {MOST_FIELDS} fields")
        head, start = self._number(start, end)
        wire_type = head & 7
        if wire_type == _VARINT:
            return head, start, self._number(start, end)[1]
        size = _WIDTH.get(wire_type)
        if wire_type == _LENGTH:
            size, start = self._number(start, end)
        if size is None or size > end - start:  # a group, which proto3 has not; or it ends early
            raise _MalformedError
        return head, start, start + size

    def _count(self, numbers: _Field, size: int) -> None:
        self.listed += size
        self.growing += size if numbers.grows else 0
        if self.listed > LISTS_LIMIT:
            raise _TooMuchError(f"more than {LISTS_LIMIT} bytes of numbers in lists; send tensors as raw bytes")

    def _number(self, start: int, end: int) -> tuple[int, int]:
        """Return the number that is at `start`, and where it ends."""
        found = _NUMBER.match(self._content, start, end)
        if found is None:
            raise _MalformedError
        number = 0
        for byte in reversed(found[0]):
            number = number << 7 | byte & 0x7F
        return number, found.end()


def _add_field(message: descriptor_pb2.DescriptorProto, scope: str, name: str, described: str) -> None:
    number, *label, kind = described.split()
    field = message.field.add(name=name, number=int(number.rstrip("?")), label=Field.LABEL_OPTIONAL)
    if label:
        field.label = Field.LABEL_REPEATED
    if number.endswith("?"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="choice")
        field.oneof_index = 0
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    elif label == ["map"]:
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, scope, "key", "1 string")
        _add_field(entry, scope, "value", f"2 {kind}")
        field.type, field.type_name = Field.TYPE_MESSAGE, f"{scope}.{message.name}.{entry.name}"
    else:
        field.type, field.type_name = Field.TYPE_MESSAGE, f"{scope}.{kind}"
