"""A KServe with one model, `net`: started with the ports of HTTP and gRPC."""

import sys

import numpy as np
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer

WEIGHTS = (np.arange(7840, dtype=np.float32) % 7 - 3).reshape(784, 10)


class Net(Model):
    def load(self):
        self.ready = True

    def predict(self, payload: InferRequest, headers=None):
        image = payload.inputs[0].as_numpy()
        logits = InferOutput(name="logits", shape=[len(image), 10], datatype="FP32")
        logits.set_data_from_numpy(image.reshape(len(image), -1).astype(np.float32) @ WEIGHTS, binary_data=True)
        return InferResponse(response_id="", model_name=self.name, infer_outputs=[logits])


http_port, grpc_port = map(int, sys.argv[1:])
net = Net("net")
net.load()
ModelServer(http_port=http_port, grpc_port=grpc_port, workers=1).start([net])
