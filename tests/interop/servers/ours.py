"""The same model for a teacher of ours."""

import time

import numpy as np

from edl_runtime.protocol.oip import TensorSpec
from edl_runtime.teacher import served

WEIGHTS = (np.arange(7840, dtype=np.float32) % 7 - 3).reshape(784, 10)


@served(
    inputs=[TensorSpec("image", "FP32", (-1, 1, 28, 28))],
    outputs=[TensorSpec("logits", "FP32", (-1, 10))],
)
def net(inputs):
    image = inputs["image"]
    return {"logits": image.reshape(len(image), -1) @ WEIGHTS}


@served(inputs=[TensorSpec("image", "FP32", (-1, 1, 28, 28))], outputs=[TensorSpec("logits", "FP32", (-1, 10))])
def slow_net(inputs):
    """Takes as long as a Python server of another project may, so that none is faster at every request."""
    time.sleep(0.1)
    return net(inputs)
