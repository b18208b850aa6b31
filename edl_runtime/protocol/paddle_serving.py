"""Messages of Paddle Serving: its general model service, and its Python pipelines.

Written from the field tables of Paddle Serving 0.9.0 (`general_model_service.proto`, `pipeline_service.proto`), and of
0.3.2 for the general model service as clients before 0.7 use it, the original EDL's among them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.infer_messages import Parameters, TensorHead, check_payload, reshaped
from edl_runtime.protocol.proto import field_numbers, message_classes
from edl_runtime.protocol.tensors import Array, array_of_list, datatype_of

LISTS = {
    "int64_data": "repeated int64",
    "float_data": "bytes",  # a packed list of floats: their little-endian bytes
    "int_data": "repeated int32",
    "float64_data": "bytes",
    "uint32_data": "repeated uint32",
    "bool_data": "repeated bool",
}
"""Where a tensor's numbers are; those of other types are in its raw bytes."""

FLOATS = {"float_data": "<f4", "float64_data": "<f8"}
"""The types of numbers in those bytes."""

_NUMBERED = {name: f"{number} {kind}" for number, (name, kind) in enumerate(LISTS.items(), 1)}

PIPELINE = message_classes(
    "baidu.paddle_serving.pipeline_serving",
    {
        "Tensor": {
            **_NUMBERED,
            "str_data": "9 repeated string",
            "byte_data": "10 bytes",
            "elem_type": "20 int32",
            "shape": "21 repeated int32",
            "lod": "22 repeated int32",
            "name": "23 string",
        },
        "Request": {
            "key": "1 repeated string",
            "value": "2 repeated string",
            "tensors": "3 repeated Tensor",
            "name": "4 string",
            "method": "5 string",
            "logid": "6 int64",
            "clientip": "7 string",
        },
        "Response": {
            "err_no": "1 int32",
            "err_msg": "2 string",
            "key": "3 repeated string",
            "value": "4 repeated string",
            "tensors": "5 repeated Tensor",
        },
    },
)

PIPELINE_SERVICE = "baidu.paddle_serving.pipeline_serving.PipelineService"
GENERAL_SERVICE = "baidu.paddle_serving.predictor.general_model.GeneralModelService"
GENERAL_PATH = "/GeneralModelService/inference"

_GENERAL_PACKAGE = "baidu.paddle_serving.predictor.general_model"
_GENERAL: dict[str, dict[str, str]] = {
    "Tensor": {
        **_NUMBERED,
        "data": "9 repeated string",
        "elem_type": "10 int32",
        "shape": "11 repeated int32",
        "lod": "12 repeated int32",
        "name": "13 string",
        "alias_name": "14 string",
        "tensor_content": "15 bytes",
    },
    "Request": {
        "tensor": "1 repeated Tensor",
        "fetch_var_names": "2 repeated string",
        "profile_server": "3 bool",
        "log_id": "4 uint64",
    },
    "ModelOutput": {"tensor": "1 repeated Tensor", "engine_name": "2 string"},
    "Response": {
        "outputs": "1 repeated ModelOutput",
        "profile_time": "2 repeated int64",
        "profile_server": "3 bool",
        "log_id": "4 uint64",
        "err_no": "5 int32",
        "err_msg": "6 string",
    },
}
GENERAL = message_classes(_GENERAL_PACKAGE, _GENERAL)
_FLOATS = {"float_data": "2 repeated float", "float64_data": "4 repeated double"}
GENERAL_JSON = message_classes(_GENERAL_PACKAGE, {**_GENERAL, "Tensor": {**_GENERAL["Tensor"], **_FLOATS}})
"""The same messages with lists of floats, for JSON; the bytes on the wire are equal."""

OLD_GENERAL = message_classes(
    _GENERAL_PACKAGE,
    {
        "Tensor": {
            "data": "1 repeated bytes",
            "int_data": "2 repeated int32",
            "int64_data": "3 repeated int64",
            "float_data": "4 repeated float",
            "elem_type": "5 int32",
            "shape": "6 repeated int32",
            "lod": "7 repeated int32",
        },
        "Instance": {"tensor_array": "1 repeated Tensor"},
        "Request": {"insts": "1 repeated Instance", "fetch_var_names": "2 repeated string"},
        "ModelOutput": {"insts": "1 repeated Instance", "engine_name": "2 string"},
        "Response": {"outputs": "1 repeated ModelOutput", "profile_time": "2 repeated int64"},
    },
)
"""The service's messages before 0.7: an instance for each sample, whose tensors have no names but an order."""

RPC = message_classes(
    "brpc.policy",
    {
        "RequestMeta": {"service_name": "1 string", "method_name": "2 string", "log_id": "3 int64"},
        "ResponseMeta": {"error_code": "1 int32", "error_text": "2 string"},
        "RpcMeta": {
            "request": "1 RequestMeta",
            "response": "2 ResponseMeta",
            "compress_type": "3 int32",
            "correlation_id": "4 int64",
            "attachment_size": "5 int32",
            "authentication_data": "7 bytes",
        },
    },
)
"""Before the message in a frame of baidu_std. https://brpc.apache.org/docs/rpc-protocols/baidu_std/"""

FRAME = struct.Struct(">4sII")
"""A frame's head: "PRPC", the bytes behind it, and how many of them are its RpcMeta."""


def pack_frame(meta: Any, content: bytes) -> bytes:
    head: bytes = meta.SerializeToString()
    return FRAME.pack(b"PRPC", len(head) + len(content), len(head)) + head + content


META_LIMIT = 1 << 16
"""Most bytes of an RpcMeta."""


def frame_sizes(head: bytes | bytearray, limit: int) -> tuple[int, int]:
    """Return the bytes behind a frame's head, and how many of them are its RpcMeta. Raises ProtocolError."""
    magic, size, meta_size = FRAME.unpack_from(head)
    if magic != b"PRPC" or meta_size > min(size, META_LIMIT) or size > limit:
        raise ProtocolError(f"the frame of baidu_std is malformed, or has more than {limit} bytes")
    return size, meta_size


ELEMENT_TYPES: Mapping[int, tuple[np.dtype[Any], str]] = {
    0: (np.dtype("<i8"), "int64_data"),
    1: (np.dtype("<f4"), "float_data"),
    2: (np.dtype("<i4"), "int_data"),
    3: (np.dtype("<f8"), "float64_data"),
    4: (np.dtype("<i2"), "tensor_content"),
    5: (np.dtype("<f2"), "tensor_content"),
    7: (np.dtype("u1"), "tensor_content"),
    8: (np.dtype("i1"), "tensor_content"),
    9: (np.dtype("?"), "bool_data"),
}
"""`elem_type` → its dtype, and the field that has the numbers."""

_TYPE_OF = {dtype: number for number, (dtype, _) in ELEMENT_TYPES.items()}


def fill_tensor(tensor: Any, array: Array) -> None:
    """Write an array into a message. Raises ProtocolError for a type that it can't have."""
    tensor.elem_type = number = element_type(tensor.name, array, tensor)
    tensor.shape.extend(array.shape)
    field = ELEMENT_TYPES[number][1]
    if isinstance(getattr(tensor, field), bytes):
        setattr(tensor, field, array.tobytes())
    else:
        getattr(tensor, field).extend(array.ravel().tolist())


def element_type(name: str, array: Array, message: Any) -> int:
    number = _TYPE_OF.get(array.dtype)
    if number is None or not hasattr(message, ELEMENT_TYPES[number][1]):
        raise ProtocolError(f"input {name!r}: {array.dtype} can't be sent to this kind of Paddle Serving")
    return number


def arrays_of_tensors(tensors: Iterable[Any], kind: str) -> dict[str, Array]:
    """Return the arrays of a general message's tensors by name, new and writable. `kind` is "input" or "output".

    Raises ProtocolError unless each has a type and numbers that fit its shape.
    """
    arrays: dict[str, Array] = {}
    for tensor in tensors:
        name = tensor.alias_name or tensor.name
        if tensor.elem_type not in ELEMENT_TYPES:
            allowed = ", ".join(map(str, ELEMENT_TYPES))
            raise ProtocolError(f"{kind} {name!r}: elem_type is {tensor.elem_type}, allowed are {allowed}")
        dtype, field = ELEMENT_TYPES[tensor.elem_type]
        numbers = getattr(tensor, field) or tensor.tensor_content
        size = len(numbers) if isinstance(numbers, bytes) else len(numbers) * dtype.itemsize
        head = TensorHead(name, datatype_of(dtype), tuple(tensor.shape), Parameters(binary_data_size=size))
        check_payload([head], size, kind)
        try:
            flat = np.frombuffer(numbers, dtype).copy() if isinstance(numbers, bytes) else array_of_list(numbers, dtype)
        except OverflowError:
            raise ProtocolError(f"{kind} {name!r}: a number is out of the range of {dtype}") from None
        if arrays.setdefault(name, array := reshaped(kind, head, flat)) is not array:
            raise ProtocolError(f"{kind} {name!r} comes twice")
    return arrays


# The general model service before 0.7

_OLD_FIELDS = {0: "int64_data", 1: "float_data", 2: "int_data"}
"""`elem_type` → the field that has the numbers."""


def is_old_request(content: bytes) -> bool:
    """Whether a Request is of a client before 0.7: its first sample has tensors and nothing else.

    As a tensor of newer ones it would be a list of numbers without a shape.
    """
    return field_numbers(content, 1) == {1}


def arrays_of_instances(instances: Sequence[Any], names: Sequence[str]) -> dict[str, Array]:
    """Return the arrays of an old request, one row an instance; `names` are those of its tensors, in their order.

    Raises ProtocolError.
    """
    if not instances:
        raise ProtocolError("the request has no instances")
    rows: dict[str, list[Array]] = {name: [] for name in names}
    for number, instance in enumerate(instances):
        if len(instance.tensor_array) != len(names):
            have, allowed = len(instance.tensor_array), f"{len(names)}: {', '.join(names)}"
            raise ProtocolError(f"instance {number} has {have} tensors, the model takes {allowed}")
        for name, tensor in zip(names, instance.tensor_array, strict=True):
            rows[name].append(_old_array(name, tensor))
    for name, arrays in rows.items():
        for number, array in enumerate(arrays):
            if (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
                given, allowed = f"{array.dtype}{list(array.shape)}", f"{arrays[0].dtype}{list(arrays[0].shape)}"
                raise ProtocolError(
                    f"input {name!r}: instance {number} is {given}, allowed is {allowed} as in the first"
                )
    return {name: np.stack(arrays) for name, arrays in rows.items()}


def _old_array(name: str, tensor: Any) -> Array:
    field = _OLD_FIELDS.get(tensor.elem_type)
    if field is None:
        allowed = ", ".join(map(str, _OLD_FIELDS))
        raise ProtocolError(f"input {name!r}: elem_type is {tensor.elem_type}, allowed are {allowed}")
    dtype = ELEMENT_TYPES[tensor.elem_type][0]
    numbers = getattr(tensor, field)
    size = len(numbers) * dtype.itemsize
    head = TensorHead(name, datatype_of(dtype), tuple(tensor.shape), Parameters(binary_data_size=size))
    check_payload([head], size, "input")
    return reshaped("input", head, array_of_list(numbers, dtype))


def old_response(outputs: Mapping[str, Array]) -> Any:
    """Return the answer to an old request, with outputs in order. Raises ProtocolError for a type it can't have."""
    answer = OLD_GENERAL["Response"]()
    instance = answer.outputs.add(engine_name="general_infer_0").insts.add()
    for name, array in outputs.items():
        number = _TYPE_OF.get(array.dtype)
        if number not in _OLD_FIELDS:
            raise ProtocolError(
                f"output {name!r}: {array.dtype} can't be sent to a client of Paddle Serving before 0.7"
            )
        tensor = instance.tensor_array.add(elem_type=number, shape=array.shape)
        getattr(tensor, _OLD_FIELDS[number]).extend(array.ravel().tolist())
    return answer
