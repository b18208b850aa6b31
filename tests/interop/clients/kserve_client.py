"""Asks a teacher all that KServe's clients can; prints it as JSON. Arguments: "http" or "grpc", and the address."""

import asyncio
import json
import sys

import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

protocol, address = sys.argv[1:]
IMAGE = np.arange(2 * 784, dtype=np.float32).reshape(2, 1, 28, 28) % 11


def request(model="teacher", image=IMAGE, datatype="FP32", output="logits", *, binary=True):
    given = InferInput("image", list(image.shape), datatype)
    given.set_data_from_numpy(image, binary_data=binary)
    wanted = [RequestedOutput(output, {"binary_data": True} if binary and protocol == "http" else None)]
    return InferRequest(model, [given], request_id="seven", request_outputs=wanted)


async def ask():
    if protocol == "http":
        rest, url = InferenceRESTClient(RESTConfig(protocol="v2")), f"http://{address}"

        def infer(asked):
            return rest.infer(url, asked, model_name=asked.model_name)

        ready = [await rest.is_server_live(url), await rest.is_server_ready(url)]
        models = [await rest.is_model_ready(url, name) for name in ("teacher", "nobody")]
    else:
        client = InferenceGRPCClient(address)
        infer = client.infer
        ready = [await client.is_server_live(), await client.is_server_ready()]
        models = [await client.is_model_ready(name) for name in ("teacher", "nobody")]
    answers = [await infer(request(binary=binary)) for binary in (True, False)]
    refused = {}
    wrong = np.zeros((1, 1, 28, 28), np.int64)
    for name, asked in {
        "model": request("nobody"),
        "dtype": request(image=wrong, datatype="INT64"),
        "output": request(output="nothing"),
    }.items():
        try:
            await infer(asked)
        except httpx.HTTPStatusError as error:
            refused[name] = str(error)
        except grpc.RpcError as error:
            refused[name] = error.details()
    return {
        "ready": ready,
        "models": models,
        "logits": [answer.outputs[0].as_numpy().tolist() for answer in answers],
        "ids": [answer.id for answer in answers],
        "refused": refused,
    }


print(json.dumps(asyncio.run(ask())))
