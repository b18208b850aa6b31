"""Protobuf messages made from tables of their fields, so that neither a compiler nor generated code is needed.

A table maps a message's name to its fields, `NAME` → `NUMBER TYPE`: "5 string", "3 repeated int64", "4 map Parameter"
(from strings to messages) or a message's name as type. A field whose number is followed by "?" is one of a `oneof`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def parsed(message: Any, content: bytes, what: str) -> Any:
    """Return a message of the class `message`. Raises ProtocolError, which begins with `what` the bytes should be."""
    try:
        return message.FromString(content)
    except DecodeError as error:
        raise ProtocolError(f"{what} is no {message.DESCRIPTOR.full_name}: {error}") from None


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
