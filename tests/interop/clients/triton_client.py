"""Asks a teacher all that `tritonclient` can; prints it as JSON. Arguments: "http" or "grpc", and the address."""

import importlib
import json
import sys

import numpy as np
from tritonclient.utils import InferenceServerException

protocol, address = sys.argv[1:]
triton = importlib.import_module(f"tritonclient.{protocol}")
as_json = {"as_json": True} if protocol == "grpc" else {}
client = triton.InferenceServerClient(address)
image = np.arange(2 * 784, dtype=np.float32).reshape(2, 1, 28, 28) % 11
given = triton.InferInput("image", image.shape, "FP32")
given.set_data_from_numpy(image)
answer = client.infer("teacher", [given], outputs=[triton.InferRequestedOutput("logits")], request_id="seven")
wrong = triton.InferInput("image", [1, 1, 28, 28], "INT64")
wrong.set_data_from_numpy(np.zeros((1, 1, 28, 28), np.int64))
refused = {}
for name, call in {
    "model": lambda: client.infer("nobody", [given]),
    "dtype": lambda: client.infer("teacher", [wrong]),
    "output": lambda: client.infer("teacher", [given], outputs=[triton.InferRequestedOutput("nothing")]),
}.items():
    try:
        call()
    except InferenceServerException as error:
        refused[name] = [error.status(), error.message()]
config, response = client.get_model_config("teacher", **as_json), answer.get_response()
json.dump(
    {
        "ready": [client.is_server_live(), client.is_server_ready(), client.is_model_ready("teacher")],
        "unknown": client.is_model_ready("nobody"),
        "server": client.get_server_metadata(**as_json),
        "metadata": client.get_model_metadata("teacher", **as_json),
        "config": config["config"] if protocol == "grpc" else config,
        "logits": answer.as_numpy("logits").tolist(),
        "id": response.id if protocol == "grpc" else response["id"],
        "refused": refused,
        "statistics": client.get_inference_statistics("teacher", **as_json)["model_stats"][0],
    },
    sys.stdout,
)
