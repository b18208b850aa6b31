"""A Triton with one model, `net`: started with the ports of HTTP, gRPC and metrics, and the most rows of a request."""

import sys

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

http_port, grpc_port, metrics_port, max_batch = map(int, sys.argv[1:])
WEIGHTS = (np.arange(7840, dtype=np.float32) % 7 - 3).reshape(784, 10)


@batch
def answer(image):
    return {"logits": image.reshape(len(image), -1) @ WEIGHTS}


ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
with Triton(config=TritonConfig(http_address="127.0.0.1", grpc_address="127.0.0.1", **ports)) as triton:
    triton.bind(
        model_name="net",
        infer_func=answer,
        inputs=[Tensor(name="image", dtype=np.float32, shape=(1, 28, 28))],
        outputs=[Tensor(name="logits", dtype=np.float32, shape=(10,))],
        config=ModelConfig(max_batch_size=max_batch),
    )
    triton.serve()
