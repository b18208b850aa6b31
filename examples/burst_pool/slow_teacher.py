"""A teacher that takes a while for each batch, as one on a GPU that has much to do: it answers y = 2 x."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from edl_runtime.teacher import TensorSpec, served

BATCH_S = 0.05


@served(inputs=[TensorSpec("x", "FP32", (-1, 4))], outputs=[TensorSpec("y", "FP32", (-1, 4))])
def answer(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Answer after BATCH_S."""
    time.sleep(BATCH_S)
    return {"y": inputs["x"] * 2}
