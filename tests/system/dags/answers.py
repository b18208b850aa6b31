"""A model that needs no framework: it doubles."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edl_runtime.teacher import TensorSpec, served


@served(inputs=[TensorSpec("x", "FP32", (-1, 2))], outputs=[TensorSpec("y", "FP32", (-1, 2))])
def double(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Answer y = 2 x."""
    return {"y": inputs["x"] * 2}
