"""Gradients of 16 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.elastic.local_run import paddle

from edl_runtime.elastic.gradients import DeviceGradients, HostGradients
from edl_runtime.elastic.groups import Alone


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", [HostGradients, DeviceGradients])
def test_a_batch_of_many_samples_overflows_nothing(kind: Any, dtype: str) -> None:
    """Their weighted sums are in 32 bits: 300 times 256 samples is more than float16 has."""
    parameter = paddle.create_parameter([2], dtype, default_initializer=paddle.nn.initializer.Constant(0.0))
    gradients = kind([parameter])
    for _ in range(2):
        parameter.grad = paddle.full([2], 300.0, dtype)
        gradients.add(256, 1.0)
    assert gradients.give(Alone(), 512) == 1.0
    np.testing.assert_array_equal(parameter.grad.astype("float32").numpy(), [300.0, 300.0])
