"""What a student does for servers that are not ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from edl_runtime.errors import SpecError
from edl_runtime.external.address import ServerAddress
from edl_runtime.external.connection import ExternalConnection
from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.oip import ModelSignature, Normalise, TensorSpec, TopK
from edl_runtime.protocol.tensors import Array, Tensor

ADDRESS = ServerAddress.parse("oip+http://127.0.0.1:8000/net")
DOUBLING = ModelSignature(
    name="net", inputs=(TensorSpec("x", "FP32", (-1, 4)),), outputs=(TensorSpec("y", "FP32", (-1, 4)),)
)


class Doubling:
    """A server that doubles, and keeps the number of rows of each request."""

    def __init__(self, signature: ModelSignature = DOUBLING, max_batch: int | None = None) -> None:
        self.rows: list[int] = []
        self._signature = signature
        self._max_batch = max_batch

    def open(self) -> None: ...
    def close(self) -> None: ...
    def check_ready(self) -> None: ...

    def signature(self) -> ModelSignature:
        return self._signature

    def max_batch(self) -> int | None:
        return self._max_batch

    def probe(self, row: Mapping[str, Array], outputs: Sequence[str]) -> None: ...
    def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Array]:
        array = np.asarray(inputs["x"])
        self.rows.append(len(array))
        return dict.fromkeys(outputs, array * 2)


def connected(server: Doubling, address: ServerAddress = ADDRESS) -> ExternalConnection:
    connection = ExternalConnection(address, server)
    connection.signature()
    return connection


X = np.arange(40, dtype=np.float32).reshape(10, 4)


@pytest.mark.parametrize(("limit", "rows"), [(None, [10]), (16, [10]), (4, [4, 4, 2])])
def test_no_request_has_more_rows_than_the_server_takes(limit: int | None, rows: list[int]) -> None:
    server = Doubling(max_batch=limit)
    assert np.array_equal(connected(server).infer({"x": X}, ["y"])["y"], X * 2)
    assert server.rows == rows


def test_an_addresss_limit_comes_before_the_servers() -> None:
    server = Doubling(max_batch=8)
    connected(server, ServerAddress.parse(f"{ADDRESS}?max_batch=5")).infer({"x": X}, ["y"])
    assert server.rows == [5, 5]


def test_requests_of_a_fixed_batch_are_filled_up() -> None:
    """And the student sees a model that takes any number of rows."""
    fixed = ModelSignature(
        name="net", inputs=(TensorSpec("x", "FP32", (4, 4)),), outputs=(TensorSpec("y", "FP32", (4, 4)),)
    )
    server = Doubling(fixed)
    connection = connected(server)
    assert connection.signature().inputs[0].shape == (-1, 4)
    assert np.array_equal(connection.infer({"x": list(X)}, ["y"])["y"], X * 2)
    assert server.rows == [4, 4, 4]


def test_the_student_normalises_and_chooses_the_largest() -> None:
    pixels = np.arange(40, dtype=np.uint8).reshape(10, 4)
    answer = connected(Doubling(max_batch=3)).infer({"x": pixels}, [TopK("y", 2)], {"x": Normalise(mean=10, std=2)})
    expected = (pixels.astype(np.float32) - 10) / 2 * 2
    assert np.array_equal(answer["y.values"], expected[:, [3, 2]])
    assert np.array_equal(answer["y.indices"], [[3, 2]] * 10)


def test_a_signature_that_nobody_tells_is_asked_for() -> None:
    with pytest.raises(SpecError, match=r"input=NAME:DATATYPE"):
        connected(Doubling(ModelSignature(name="net")))
    told = ServerAddress.parse(f"{ADDRESS}?input=x:FP32:-1.4&output=y:FP32:-1.4")
    assert ExternalConnection(told, Doubling(ModelSignature(name="net"))).signature().inputs == DOUBLING.inputs


def test_answers_with_missing_rows_are_refused() -> None:
    class Short(Doubling):
        def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Array]:
            return {name: array[1:] for name, array in super().infer(inputs, outputs).items()}

    with pytest.raises(ProtocolError, match="for 4 rows"):
        connected(Short(max_batch=4)).infer({"x": X}, ["y"])


def test_an_answer_in_parts_has_the_limit_of_a_whole_one() -> None:
    """Each part may be as large as an answer, and memory is taken for all of them at the first."""

    class Large(Doubling):
        def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Array]:
            (found,) = super().infer(inputs, outputs).values()
            return dict.fromkeys(outputs, np.broadcast_to(found[:, :1], (len(found), 1 << 26)))

    with pytest.raises(ProtocolError, match="output 'y' has 268435456 bytes a row, allowed are 1073741824 for 10 rows"):
        connected(Large(max_batch=1)).infer({"x": X}, ["y"])


def test_an_output_that_comes_for_some_rows_only_is_refused() -> None:
    """Its other rows would be whatever is in memory."""

    class Forgetful(Doubling):
        def infer(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Array]:  # noqa: ARG002
            found = super().infer(inputs, ["y", "z"])
            return found if len(self.rows) == 1 else {"y": found["y"]}

    with pytest.raises(ProtocolError, match="outputs are not alike"):
        connected(Forgetful(max_batch=4)).infer({"x": X}, [])


NESTED = (-1, *[1] * 64)  # one axis more than numpy has


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ([("x", (0, 4))], "input 'x': shape is [0, 4], allowed are at most 32 axes of 1 or more"),
        ([("x", (-1, 0))], "shape is [-1, 0]"),
        ([("x", (-1, -5))], "shape is [-1, -5]"),
        ([("x", (-1, 1 << 62))], "shape is [-1, 4611686018427387904]"),
        ([("x", (-1, 10**4000, 10**4000))], "shape is [-1, 1000"),
        ([("x", NESTED)], "input 'x': shape is [-1, 1, 1"),
        ([("x", (-1, 1 << 40))], "1 rows of its 1 inputs have 4398046511104 bytes, allowed are 268435456"),
        ([(f"x{number}", (-1, 1 << 24)) for number in range(300)], "1 rows of its 300 inputs have 20132659200 bytes"),
        ([("x", (2, 4)), ("y", (3, 4))], "different fixed batches: [2, 3]"),
        ([("", (-1, 4))], "input has the name '', allowed is one of 1 to 1000 characters"),
        ([("x" * 1001, (-1, 4))], "(1,001 characters)"),
        ([("x", (-1, 4)), ("x", (-1, 4))], "input has the name 'x', allowed is one of 1 to 1000 characters that no"),
        ([(f"x{number}", (-1, 1)) for number in range(5000)], "it has 5000 inputs, allowed are 4096"),
    ],
)
def test_inputs_that_no_request_can_have_are_refused(inputs: list[tuple[str, tuple[int, ...]]], problem: str) -> None:
    """They are the server's words, and nothing is allocated by them."""
    specs = tuple(TensorSpec(name, "FP32", shape) for name, shape in inputs)
    with pytest.raises(ProtocolError, match=re.escape(problem)):
        connected(Doubling(ModelSignature(name="net", inputs=specs, outputs=DOUBLING.outputs)))


def test_outputs_that_no_answer_can_have_are_refused() -> None:
    outputs = (TensorSpec("y", "FP32", NESTED),)
    with pytest.raises(ProtocolError, match=r"output 'y': shape is \[-1, 1, 1"):
        connected(Doubling(ModelSignature(name="net", inputs=DOUBLING.inputs, outputs=outputs)))
