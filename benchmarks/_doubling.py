"""A model for teachers that only have to be there."""

from __future__ import annotations

from collections.abc import Mapping

from edl_runtime.protocol.tensors import Array
from edl_runtime.teacher import TensorSpec, served


@served(inputs=[TensorSpec("x", "FP32", (-1, 4))], outputs=[TensorSpec("y", "FP32", (-1, 4))])
def double(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {"y": inputs["x"] * 2}
