"""Whatever servers of other protocols answer is understood or refused; nothing else happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from support.depth import examples
from support.fuzzing import messages

from edl_runtime.errors import SpecError
from edl_runtime.external.address import ServerAddress
from edl_runtime.external.paddle_serving import array_of_text
from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.oip_grpc import MESSAGES, arrays_of
from edl_runtime.protocol.paddle_serving import (
    ELEMENT_TYPES,
    FRAME,
    GENERAL,
    OLD_GENERAL,
    PIPELINE,
    RPC,
    arrays_of_instances,
    arrays_of_tensors,
    fill_tensor,
    frame_sizes,
    pack_frame,
)
from edl_runtime.protocol.proto import parsed
from edl_runtime.protocol.tensors import Array, datatype_of

INPUTS = examples(3_000, 100_000)


def some_array(chance: random.Random) -> Array:
    dtype, _ = chance.choice(list(ELEMENT_TYPES.values()))
    shape = [chance.randint(0, 3) for _ in range(chance.randint(1, 3))]
    numbers = np.frombuffer(chance.randbytes(int(np.prod(shape)) * dtype.itemsize), np.uint8)
    return (numbers % 2 if dtype == np.bool_ else numbers).view(dtype).reshape(shape)


def equal(first: Array, second: Array) -> bool:
    return first.tobytes() == second.tobytes() and first.dtype == second.dtype and first.shape == second.shape


def oip_grpc(chance: random.Random) -> None:
    array = some_array(chance)
    answer = MESSAGES["ModelInferResponse"](model_name="net")
    for name in ("y", "z"):
        answer.outputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
        answer.raw_output_contents.append(array.tobytes())
    good = answer.SerializeToString()
    sent = messages.damaged_bytes(chance, good)
    try:
        found = parsed(MESSAGES["ModelInferResponse"], sent, "net")
        arrays = arrays_of(found.outputs, found.raw_output_contents, "output")
    except ProtocolError:
        assert sent != good
        return
    if sent == good:
        assert equal(arrays["y"], array)
        assert equal(arrays["z"], array)


def oip_grpc_numbers(chance: random.Random) -> None:
    numbers = [chance.randint(-3, 300) for _ in range(4)]
    answer = MESSAGES["ModelInferResponse"]()
    output = answer.outputs.add(name="y", datatype=chance.choice(["UINT8", "INT32", "INT8"]), shape=[2, 2])
    field = "uint_contents" if output.datatype == "UINT8" else "int_contents"
    getattr(output.contents, field).extend(map(abs, numbers) if field == "uint_contents" else numbers)
    sent = messages.damaged_bytes(chance, answer.SerializeToString())
    with suppress(ProtocolError):
        found = parsed(MESSAGES["ModelInferResponse"], sent, "net")
        for name, array in arrays_of(found.outputs, found.raw_output_contents, "output").items():
            assert isinstance(name, str)
            assert array.flags.writeable


def general_model(chance: random.Random) -> None:
    array = some_array(chance)
    answer = GENERAL["Response"]()
    fill_tensor(answer.outputs.add().tensor.add(name="y", alias_name="y"), array)
    good = pack_frame(RPC["RpcMeta"](correlation_id=7), answer.SerializeToString())
    sent = messages.damaged_bytes(chance, good)
    try:
        if len(sent) < FRAME.size:
            return
        size, meta_size = frame_sizes(sent, 1 << 20)
        assert 0 <= meta_size <= size <= 1 << 20
        body = sent[FRAME.size :][:size]
        parsed(RPC["RpcMeta"], body[:meta_size], "net")
        response = parsed(GENERAL["Response"], body[meta_size:], "net")
        arrays = arrays_of_tensors((tensor for output in response.outputs for tensor in output.tensor), "output")
    except ProtocolError:
        assert sent != good
        return
    if sent == good:
        assert equal(arrays["y"], array)


def old_general_model(chance: random.Random) -> None:
    array = chance.choice([np.float32, np.int64, np.int32])(np.arange(4))
    request = OLD_GENERAL["Request"]()
    field = {"f": "float_data", "q": "int64_data", "l": "int64_data", "i": "int_data"}[array.dtype.char]
    number = {"float_data": 1, "int64_data": 0, "int_data": 2}[field]
    for _ in range(2):
        request.insts.add().tensor_array.add(elem_type=number, shape=[2, 2], **{field: array})
    sent = messages.damaged_bytes(chance, good := request.SerializeToString())
    try:
        arrays = arrays_of_instances(parsed(OLD_GENERAL["Request"], sent, "net").insts, ["x"])
    except ProtocolError:
        assert sent != good
        return
    if sent == good:
        assert equal(arrays["x"], np.stack([array.reshape(2, 2)] * 2))


def pipeline(chance: random.Random) -> None:
    array = some_array(chance)
    with np.printoptions(threshold=10**6):
        text = repr(array)
    answer = PIPELINE["Response"](key=["y"], value=[text])
    sent = messages.damaged_bytes(chance, answer.SerializeToString())
    with suppress(ProtocolError):
        for value in parsed(PIPELINE["Response"], sent, "net").value:
            array_of_text("y", value, chance.choice([np.dtype(np.float32), array.dtype]))


def address(chance: random.Random) -> None:
    good = b"oip+grpc://127.0.0.1:8001/a%2Fb?input=x:0:FP32:-1.3&output=y:INT64:-1&max_batch=8"
    text = messages.damaged_bytes(chance, good).decode("latin-1")
    with suppress(SpecError):
        read = ServerAddress.parse(text)
        assert ServerAddress.parse(str(read)) == read


@pytest.mark.parametrize("check", [oip_grpc, oip_grpc_numbers, general_model, old_general_model, pipeline, address])
def test_whatever_comes_is_understood_or_refused(check: Callable[[random.Random], Any]) -> None:
    """Damaged and random bytes raise no other error; good ones arrive as they were sent."""
    for number in range(INPUTS):
        try:
            check(random.Random(f"18/{number}"))
        except Exception as error:
            error.add_note(f"{check.__name__} of number {number}")
            raise
