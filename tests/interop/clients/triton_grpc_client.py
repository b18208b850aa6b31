"""Asks a teacher all that `tritonclient.grpc` can; prints it as JSON. Argument: the address."""

import json
import sys

import numpy as np
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

client = grpc.InferenceServerClient(sys.argv[1])
image = np.arange(2 * 784, dtype=np.float32).reshape(2, 1, 28, 28) % 11
given = grpc.InferInput("image", image.shape, "FP32")
given.set_data_from_numpy(image)
answer = client.infer("teacher", [given], outputs=[grpc.InferRequestedOutput("logits")], request_id="seven")
wrong = grpc.InferInput("image", [1, 1, 28, 28], "INT64")
wrong.set_data_from_numpy(np.zeros((1, 1, 28, 28), np.int64))
refused = {}
for name, call in {
    "model": lambda: client.infer("nobody", [given]),
    "dtype": lambda: client.infer("teacher", [wrong]),
    "output": lambda: client.infer("teacher", [given], outputs=[grpc.InferRequestedOutput("nothing")]),
}.items():
    try:
        call()
    except InferenceServerException as error:
        refused[name] = [error.status(), error.message()]
json.dump(
    {
        "ready": [client.is_server_live(), client.is_server_ready(), client.is_model_ready("teacher")],
        "unknown": client.is_model_ready("nobody"),
        "server": client.get_server_metadata(as_json=True),
        "metadata": client.get_model_metadata("teacher", as_json=True),
        "config": client.get_model_config("teacher", as_json=True)["config"],
        "logits": answer.as_numpy("logits").tolist(),
        "id": answer.get_response().id,
        "refused": refused,
        "statistics": client.get_inference_statistics("teacher", as_json=True)["model_stats"][0],
    },
    sys.stdout,
)
