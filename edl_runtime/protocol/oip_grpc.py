"""Messages of the Open Inference Protocol v2 over gRPC, with Triton's configuration and statistics of a model.

https://github.com/kserve/open-inference-protocol, and Triton's `grpc_service.proto`. Tensors are raw little-endian
bytes, or numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.infer_messages import Parameters, TensorHead, check_payload, reshaped
from edl_runtime.protocol.proto import message_classes
from edl_runtime.protocol.tensors import Array, array_of_list, dtype_of

SERVICE = "inference.GRPCInferenceService"

_TENSOR = {"name": "1 string", "datatype": "2 string", "shape": "3 repeated int64"}
_WITH_CONTENTS = {**_TENSOR, "parameters": "4 map Parameter", "contents": "5 Contents"}
_ANSWER = {"model_name": "1 string", "model_version": "2 string", "id": "3 string", "parameters": "4 map Parameter"}

MESSAGES = message_classes(
    "inference",
    {
        "Parameter": {
            "bool_param": "1? bool",
            "int64_param": "2? int64",
            "string_param": "3? string",
            "double_param": "4? double",
            "uint64_param": "5? uint64",
        },
        "Contents": {
            "bool_contents": "1 repeated bool",
            "int_contents": "2 repeated int32",
            "int64_contents": "3 repeated int64",
            "uint_contents": "4 repeated uint32",
            "uint64_contents": "5 repeated uint64",
            "fp32_contents": "6 repeated float",
            "fp64_contents": "7 repeated double",
            "bytes_contents": "8 repeated bytes",
        },
        "Model": {"name": "1 string", "version": "2 string"},
        "Nothing": {},
        "ServerLive": {"live": "1 bool"},
        "ServerReady": {"ready": "1 bool"},
        "ModelReady": {"ready": "1 bool"},
        "ServerMetadata": {"name": "1 string", "version": "2 string", "extensions": "3 repeated string"},
        "StatisticDuration": {"count": "1 uint64", "ns": "2 uint64"},
        "InferStatistics": {
            "success": "1 StatisticDuration",
            "fail": "2 StatisticDuration",
            "queue": "3 StatisticDuration",
            "compute_input": "4 StatisticDuration",
            "compute_infer": "5 StatisticDuration",
            "compute_output": "6 StatisticDuration",
        },
        "ModelStatistics": {
            "name": "1 string",
            "version": "2 string",
            "inference_count": "4 uint64",
            "execution_count": "5 uint64",
            "inference_stats": "6 InferStatistics",
        },
        "ModelStatisticsResponse": {"model_stats": "1 repeated ModelStatistics"},
        "TensorMetadata": _TENSOR,
        "ModelMetadata": {
            "name": "1 string",
            "versions": "2 repeated string",
            "platform": "3 string",
            "inputs": "4 repeated TensorMetadata",
            "outputs": "5 repeated TensorMetadata",
        },
        "ModelInput": {"name": "1 string", "data_type": "2 int32", "dims": "4 repeated int64"},
        "ModelOutput": {"name": "1 string", "data_type": "2 int32", "dims": "3 repeated int64"},
        "ModelConfig": {
            "name": "1 string",
            "platform": "2 string",
            "max_batch_size": "4 int32",
            "input": "5 repeated ModelInput",
            "output": "6 repeated ModelOutput",
        },
        "ModelConfigResponse": {"config": "1 ModelConfig"},
        "InputTensor": _WITH_CONTENTS,
        "OutputTensor": _WITH_CONTENTS,
        "RequestedOutput": {"name": "1 string", "parameters": "2 map Parameter"},
        "ModelInferRequest": {
            **_ANSWER,
            "inputs": "5 repeated InputTensor",
            "outputs": "6 repeated RequestedOutput",
            "raw_input_contents": "7 repeated bytes",
        },
        "ModelInferResponse": {
            **_ANSWER,
            "outputs": "5 repeated OutputTensor",
            "raw_output_contents": "6 repeated bytes",
        },
    },
)

_TRITON_ORDER = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
TRITON_TYPES = {name: n for n, name in enumerate((*_TRITON_ORDER, "FP16", "FP32", "FP64", "BYTES", "BF16"), 1)}
"""Datatypes in Triton's configuration of a model."""

_CONTENTS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
"""Where numbers of each datatype are that don't travel as raw bytes."""


def arrays_of(tensors: Any, raw_contents: Any, kind: str) -> dict[str, Array]:
    """Return the arrays of a message by name, new and writable. `kind` is "input" or "output", for messages.

    Raises ProtocolError unless all have the size that their shape and datatype say.
    """
    raw = list(raw_contents)
    if raw and len(raw) != len(tensors):
        raise ProtocolError(f"{len(raw)} raw_{kind}_contents come for {len(tensors)} {kind}s")
    arrays: dict[str, Array] = {}
    for number, tensor in enumerate(tensors):
        array = _from_raw(tensor, raw[number], kind) if raw else _from_numbers(tensor, kind)
        if arrays.setdefault(tensor.name, array) is not array:
            raise ProtocolError(f"{kind} {tensor.name!r} comes twice")
    return arrays


def _from_raw(tensor: Any, raw: bytes, kind: str) -> Array:
    head = TensorHead(tensor.name, tensor.datatype, tuple(tensor.shape), Parameters(binary_data_size=len(raw)))
    check_payload([head], len(raw), kind)
    return reshaped(kind, head, np.frombuffer(raw, dtype_of(tensor.datatype)).copy())


def _from_numbers(tensor: Any, kind: str) -> Array:
    head = TensorHead(tensor.name, tensor.datatype, tuple(tensor.shape), data=())
    check_payload([head], 0, kind)
    field = _CONTENTS.get(tensor.datatype)
    numbers = getattr(tensor.contents, field) if field else ()
    if len(numbers) != math.prod(head.shape):
        found = f"{len(numbers)} numbers of {tensor.datatype} come for shape {list(head.shape)}"
        raise ProtocolError(f"{kind} {tensor.name!r}: {found}")
    try:
        return reshaped(kind, head, array_of_list(numbers, dtype_of(tensor.datatype)))
    except OverflowError:
        raise ProtocolError(f"{kind} {tensor.name!r}: a number is out of the range of {tensor.datatype}") from None
