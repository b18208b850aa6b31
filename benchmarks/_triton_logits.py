"""A Triton whose model answers zeros, in `.interop/triton`: started with the ports of HTTP, gRPC and metrics."""

import sys

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

http, grpc, metrics = map(int, sys.argv[1:])


@batch
def answer(image):  # noqa: ANN001, ANN202 - run by another interpreter
    return {"logits": np.zeros((len(image), 1000), np.float32)}


ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics}
with Triton(config=TritonConfig(http_address="127.0.0.1", grpc_address="127.0.0.1", **ports)) as triton:
    triton.bind(
        model_name="net",
        infer_func=answer,
        inputs=[Tensor(name="image", dtype=np.float32, shape=(3, 224, 224))],
        outputs=[Tensor(name="logits", dtype=np.float32, shape=(1000,))],
        config=ModelConfig(max_batch_size=64),
    )
    triton.serve()
