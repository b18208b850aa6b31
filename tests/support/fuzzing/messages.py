"""Messages as a good student and a good teacher send them: what fuzzing starts from."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np

from edl_runtime.protocol.http import render_request, render_response
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.protocol.region import REGION, REGISTER_PATH, START
from edl_runtime.protocol.tensors import Array, datatype_of

TENSORS = (
    TensorSpec("image", "FP32", (-1, 2, 2)),
    TensorSpec("tokens", "INT64", (-1, -1)),
    TensorSpec("mask", "BOOL", (-1,)),
)
SIGNATURE = ModelSignature(name="teacher", versions=("1",), platform="fuzz", inputs=TENSORS, outputs=TENSORS)
"""Of a model that answers its inputs, so that whoever knows the request knows the answer."""

INFER = "/v2/models/teacher/infer"
QUESTIONS = ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/teacher", "/v2/models/teacher/ready", "/none")

SHARED = 4096
"""Bytes of shared memory that a request may lie in here."""

REGISTRATION = b"?" * 256
"""Stands for a registration that is good in the process that plays a case: it holds that one's id."""

Tree = dict[str, Any]


def arrays(chance: random.Random) -> dict[str, Array]:
    """Return inputs of up to three rows."""
    rows, length = chance.randint(0, 3), chance.randint(0, 3)
    numbers = np.frombuffer(chance.randbytes(rows * (4 + length + 1)), np.int8)
    return {
        "image": (numbers[: 4 * rows] / 8).astype(np.float32).reshape(rows, 2, 2),
        "tokens": numbers[4 * rows : (4 + length) * rows].astype(np.int64).reshape(rows, length),
        "mask": numbers[(4 + length) * rows :] > 0,
    }


def tensor_trees(chance: random.Random, given: dict[str, Array]) -> tuple[list[Tree], bytes]:
    """Return the JSON of these tensors, some as numbers in it, and the bytes of the others."""
    trees: list[Tree] = []
    payload = b""
    for name, array in given.items():
        tree: Tree = {"name": name, "datatype": datatype_of(array.dtype), "shape": list(array.shape)}
        if chance.random() < 0.65:
            tree["parameters"] = {"binary_data_size": array.nbytes}
            payload += array.tobytes()
        else:
            tree["data"] = (array if chance.random() < 0.5 else array.ravel()).tolist()
        trees.append(tree)
    return trees, payload


def request_tree(chance: random.Random, given: dict[str, Array]) -> tuple[Tree, bytes]:
    """Return a request's JSON, and the bytes that follow it."""
    how = None
    if chance.random() < 0.2:
        given = {**given, "image": given["image"].astype(np.int8).view(np.uint8)}
        channels = chance.choice((1, 2))
        how = {"mean": [0.5] * channels, "std": [2] * chance.choice((1, channels)), "axis": chance.choice((1, 1, 2, 3))}
    inputs, payload = tensor_trees(chance, given)
    if how is not None:
        inputs[0].setdefault("parameters", {})["normalise"] = how
    tree: Tree = {"inputs": inputs}
    if chance.random() < 0.7:
        wanted = chance.sample(sorted(given), chance.randint(1, 3))
        tree["outputs"] = [{"name": name, "parameters": {"binary_data": chance.random() < 0.8}} for name in wanted]
        if chance.random() < 0.3:
            chance.choice(tree["outputs"])["parameters"]["top_k"] = chance.choice((1, 1, 2, 3))
    if chance.random() < 0.3:
        tree["parameters"] = {"binary_data_output": chance.random() < 0.8}
    if chance.random() < 0.3:
        tree["id"] = "é" * chance.randint(0, 3)
    return tree, payload


def shared_tree(chance: random.Random, given: dict[str, Array]) -> Tree:
    """Return a request's JSON whose tensors lie in shared memory."""
    tree, _ = request_tree(chance, given)
    for tensor in tree["inputs"]:
        if size := tensor.get("parameters", {}).pop("binary_data_size", 0):
            offset = chance.choice((START, START, START + 1, SHARED - size, -START, SHARED))
            tensor["parameters"] |= {
                "shared_memory_region": chance.choice((REGION, REGION, REGION, "other")),
                "shared_memory_offset": offset,
                "shared_memory_byte_size": size,
            }
        elif "data" not in tensor:
            tensor["data"] = []
    return tree


def answer_tree(chance: random.Random, given: dict[str, Array]) -> tuple[Tree, bytes]:
    """Return an answer's JSON, and the bytes that follow it."""
    outputs, payload = tensor_trees(chance, given)
    return {"model_name": "teacher", "model_version": "1", "outputs": outputs}, payload


def json_of(tree: Any) -> bytes:
    """Return `tree` as JSON; numbers beyond 64 bits in a way that is not, as a peer may send it."""
    return msgspec.json.encode(tree, enc_hook=str)


def http_request(header: bytes, payload: bytes) -> bytes:
    """Return a request to infer, head and all."""
    sizes = {"Content-Length": len(header) + len(payload), "Inference-Header-Content-Length": len(header)}
    return render_request("POST", INFER, {"Host": "a", **sizes}) + header + payload


def http_registration() -> bytes:
    """Return a request to register shared memory."""
    return render_request("POST", REGISTER_PATH, {"Host": "a", "Content-Length": len(REGISTRATION)}) + REGISTRATION


def http_answer(header: bytes, payload: bytes, status: int = 200, told: int | None = None) -> bytes:
    """Return an answer, head and all, which may tell another size of what follows the JSON."""
    size = len(header) + (len(payload) if told is None else told)
    return render_response(status, {"Content-Length": size, "Inference-Header-Content-Length": len(header)}) + (
        header + payload
    )
