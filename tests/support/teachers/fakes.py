"""Teachers without a network, for tests of students and faults of teachers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edl_runtime.protocol.oip import ModelSignature, Normalise, TensorSpec, TopK, response_names
from edl_runtime.protocol.tensors import Array, Tensor

SIGNATURE = ModelSignature(
    name="teacher",
    versions=("1",),
    inputs=(TensorSpec("x", "FP32", (-1, 4)),),
    outputs=(TensorSpec("double", "FP32", (-1, 4)), TensorSpec("sum", "FP32", (-1,))),
)

Behaviour = Callable[[Array], dict[str, Array]]


def arithmetic(x: Array) -> dict[str, Array]:
    """The answers of a teacher without faults."""
    return {"double": x * 2, "sum": x.sum(axis=1)}


class FakeTeachers:
    """Teachers by address; `connect` is passed to a reader. Those without a behaviour refuse connections.

    `asked` counts the requests of each teacher, `rows` has the sizes of all, in any order. `asked_alone` counts those
    that must not be batched with others.
    """

    def __init__(
        self, behaviours: Mapping[str, Behaviour], signatures: Mapping[str, ModelSignature] | None = None
    ) -> None:
        self.behaviours = dict(behaviours)
        self.signatures = dict(signatures or {})
        self.not_ready: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.rows: list[int] = []
        self.asked_alone: Counter[str] = Counter()
        self.lock = threading.Lock()

    def connect(self, address: str) -> FakeConnection:
        return FakeConnection(self, address)


class FakeConnection:
    """A connection to one of them."""

    def __init__(self, teachers: FakeTeachers, address: str) -> None:
        self._teachers = teachers
        self._address = address

    def open(self) -> None:
        if self._address not in self._teachers.behaviours:
            raise ConnectionRefusedError("nothing listens")

    def close(self) -> None:
        """Nothing is open."""

    def ready(self) -> bool:
        return self._address not in self._teachers.not_ready

    def signature(self) -> ModelSignature:
        return self._teachers.signatures.get(self._address, SIGNATURE)

    def infer(
        self,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[str | TopK],
        normalise: Mapping[str, Normalise],
        *,
        alone: bool = False,
    ) -> dict[str, Array]:
        assert not normalise
        x = np.asarray(inputs["x"])
        with self._teachers.lock:
            self._teachers.asked[self._address] += 1
            self._teachers.rows.append(len(x))
            self._teachers.asked_alone[self._address] += alone
        answers = self._teachers.behaviours[self._address](x)
        return {name: answers[name] for output in outputs for name in response_names(output)}
