"""Messages of students and teachers, valid and damaged."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from edl_runtime.protocol.http_heads import render_request, render_response
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.protocol.shared_memory import REGION_NAME, REGISTER_PATH, TENSORS_START
from edl_runtime.protocol.tensors import Array, datatype_of

TENSORS = (
    TensorSpec("image", "FP32", (-1, 2, 2)),
    TensorSpec("tokens", "INT64", (-1, -1)),
    TensorSpec("mask", "BOOL", (-1,)),
)
SIGNATURE = ModelSignature(name="teacher", versions=("1",), platform="fuzz", inputs=TENSORS, outputs=TENSORS)
"""Of a model that answers its inputs."""

SHARED = 4096
"""Bytes of shared memory for requests."""

REGISTRATION = b"?" * 256
"""Placeholder of a valid registration, which contains the id of the process that runs a case."""

Tree = dict[str, Any]

_TOKENS = (
    *(b'"', b"[", b"]", b"{", b"}", b",", b":", b"-", b"\\", b"\0", b"\xff", b"\xc3\xa9", b"\r\n", b"\r\n\r\n", b"\n"),
    *(b"9" * 25, b"1e999", b"-0", b"null", b"true", b"NaN", b'"\\ud800"', b"[" * 70, b"[" * 2000, b"{}", b" " * 50),
    *(b"HTTP/1.0", b"HTTP/1.1 200 OK\r\n", b"GET / HTTP/1.1\r\n\r\n", b"Content-Length: 3\r\n", b"chunked"),
)
_HEAD_LINES = (
    *(b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"Connection: close", b"Connection: upgrade"),
    *(b"Upgrade: h2c", b"Content-Encoding: gzip", b"Authorization: Bearer x", b" folded", b"no colon", b": nameless"),
    *(b"Content-Length: 0", b"Inference-Header-Content-Length: 2", b"A: " + b"a" * 20_000, b"A: " + b"a" * 70_000),
    *(b"A:\r\n" * 400, b"\0: \0"),
)
_SIZES = (
    *(b"-1", b"0", b"1", b"+5", b"5, 5", b"0x10", b"1e3", b"", b"\xff", b"\xb2", b"70000", b"1073741824"),
    *(b"1073741825", b"999999999999999999", b"9" * 19, b"18446744073709551617", b"9" * 300),
)
_PATHS = ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/teacher", "/v2/models/teacher/ready", "/none")
_DATATYPES = ("FP32", "INT64", "BOOL", "FP16", "UINT8", "UINT64", "BYTES", "BF16", "fp32", "FP128", "")
_PARAMETERS = (
    *("binary_data_size", "binary_data", "binary_data_output", "top_k", "normalise", "classification", "sequence_id"),
    *("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"),
)
_WORDS = ("", "image", "tokens", "mask", "x", "\0", "é\U0001f600", "a" * 300, *_DATATYPES)
_NUMBERS = (0, 1, -1, 3, 12, 127, 128, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, 10**30, -(2**63), 0.5, 1e300, -0.0)


def arrays(chance: random.Random) -> dict[str, Array]:
    """Return inputs of up to three rows."""
    rows, length = chance.randint(0, 3), chance.randint(0, 3)
    size = rows * (4 + length + 1)
    numbers = np.frombuffer(chance.randbytes(size), np.int8)
    return {
        "image": (numbers[: 4 * rows] / 8).astype(np.float32).reshape(rows, 2, 2),
        "tokens": numbers[4 * rows : (4 + length) * rows].astype(np.int64).reshape(rows, length),
        "mask": numbers[(4 + length) * rows :] > 0,
    }


def tensors(chance: random.Random, given: dict[str, Array]) -> tuple[list[Tree], bytes]:
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


def request_tree(chance: random.Random, given: dict[str, Array], *, shared: bool = False) -> tuple[Tree, bytes]:
    """Return a request's JSON with all options, and the bytes that follow it or are in shared memory."""
    how = None
    if chance.random() < 0.20:
        given = {**given, "image": given["image"].astype(np.int8).view(np.uint8)}
        channels = chance.randint(1, 2)
        how = {"mean": [0.5] * channels, "std": [2] * channels, "axis": chance.choice((1, 1, 2, 3))}
    inputs, payload = tensors(chance, given)
    for tensor in inputs if shared else ():
        if size := tensor.get("parameters", {}).pop("binary_data_size", 0):
            tensor["parameters"] |= {
                "shared_memory_region": chance.choice((*[REGION_NAME] * 9, "other")),
                "shared_memory_offset": chance.choice(
                    (*[TENSORS_START] * 6, TENSORS_START + 1, SHARED - size, -TENSORS_START, SHARED)
                ),
                "shared_memory_byte_size": size,
            }
        elif "data" not in tensor:
            tensor["data"] = []
    if how is not None:
        inputs[0].setdefault("parameters", {})["normalise"] = how
    tree: Tree = {"inputs": inputs, "parameters": {"binary_data_output": chance.random() < 0.5}, "id": "é"}
    tree["outputs"] = [
        {"name": name, "parameters": {"binary_data": chance.random() < 0.8}}
        for name in chance.sample(sorted(given), chance.randint(0, 3))
    ]
    if tree["outputs"] and chance.random() < 0.3:
        chance.choice(tree["outputs"])["parameters"]["top_k"] = chance.randint(1, 3)
    return tree, b"" if shared else payload


def _anything(chance: random.Random, depth: int) -> Any:
    match chance.randrange(6) if depth else 0:
        case 0 | 1:
            return chance.choice((None, True, False, *_NUMBERS, *_WORDS))
        case 2:
            nested: Any = []
            for _ in range(chance.choice((3, 31, 33, 65, 400))):
                nested = [nested]
            return nested
        case 3:
            return [_anything(chance, 0)] * chance.choice((0, 1, 50, 500))
        case 4:
            return {chance.choice((*_PARAMETERS, *_WORDS)): _anything(chance, depth - 1) for _ in range(3)}
        case _:
            return [_anything(chance, depth - 1) for _ in range(chance.randint(0, 4))]


def _instead(chance: random.Random, key: Any) -> Any:
    """Return what a malicious peer would send here."""
    if key == "datatype":
        return chance.choice(_DATATYPES)
    if key == "shape":
        return chance.choice((chance.choices(_NUMBERS, k=chance.randint(0, 4)), [1] * chance.choice((31, 32, 33, 300))))
    if key == "parameters":
        mean, std, axis = chance.choices(_NUMBERS, k=3)
        values = ({"mean": [mean], "std": [std], "axis": axis}, axis, True, "x", _anything(chance, 2))
        return {chance.choice(_PARAMETERS): chance.choice(values) for _ in range(chance.randint(1, 4))}
    return _anything(chance, 3)


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all nodes of JSON, each by its parent and key."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _nodes(tree[key])


def damaged_json(chance: random.Random, tree: Tree) -> bytes:
    """Return the JSON with up to three nodes changed, doubled, renamed or removed; numbers beyond 64 bits are text."""
    for _ in range(chance.choice((0, 0, 1, 1, 2, 3))):
        nodes = list(_nodes(tree))
        if not nodes:
            break
        parent, key = chance.choice(nodes)
        match chance.randint(0, 5):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, list):
                parent.insert(key, parent[key])  # a name, an axis, a number that comes twice
            case 1:
                parent[chance.choice((*_PARAMETERS, *_WORDS))] = parent.pop(key)
            case 2:
                parent[key] = _anything(chance, 3)
            case _ if isinstance(parent[key], bool | int | float):
                parent[key] = chance.choice((parent[key] + 1, parent[key] - 1, parent[key] * 2, *_NUMBERS))
            case _:
                parent[key] = _instead(chance, key)
    return msgspec.json.encode(tree, enc_hook=str)


def falsify_sizes(chance: random.Random, trees: list[Tree]) -> int:
    """Change shapes and declared sizes of binary tensors alike; return the sum of declared sizes."""
    binary = [tree for tree in trees if tree["shape"] and "binary_data_size" in tree.get("parameters", {})]
    for tree in binary:
        times = chance.choice((-1, 0, 1, 1, 2, 2**20, 2**40, 2**61))
        tree["shape"][chance.randint(0, len(tree["shape"]) - 1)] *= times
        tree["parameters"]["binary_data_size"] *= times
    return sum(max(0, tree["parameters"]["binary_data_size"]) for tree in binary)


def damaged_bytes(chance: random.Random, good: bytes) -> bytes:
    """Return the bytes with up to four pieces changed, cut or doubled, or random bytes."""
    if chance.random() < 0.05:
        return chance.randbytes(chance.randint(0, 200))
    bad = bytearray(good)
    for _ in range(chance.choice((0, 0, 0, 1, 2, 4))):
        at = chance.randint(0, len(bad))
        upto = min(len(bad), at + chance.choice((0, 1, 1, 4, 30, 1000)))
        match chance.randint(0, 4):
            case 0 if at < len(bad):
                bad[at] ^= 1 << chance.randint(0, 7)
            case 1:
                del bad[at:]
            case 2:
                bad[at:upto] *= chance.choice((2, 3, 40))
            case _:
                bad[at:upto] = chance.choice((*_TOKENS, chance.randbytes(chance.randint(0, 9))))
    return bytes(bad)


def damaged_head(chance: random.Random, message: bytes) -> bytes:
    """Return an HTTP message whose head may have wrong sizes or more lines."""
    head, end, body = message.partition(b"\r\n\r\n")
    for _ in range(chance.randint(0, 2)):
        sizes = list(re.finditer(rb"(?<=Length: )[^\r]*", head))
        if sizes and chance.random() < 0.60:
            at = chance.choice(sizes)
            near = [b"%d" % max(0, int(at[0]) + by) for by in (-8, -1, 1, 8, 64)] if at[0].isdigit() else []
            head = head[: at.start()] + chance.choice((*near, *_SIZES)) + head[at.end() :]
        else:
            lines = head.split(b"\r\n")
            lines.insert(chance.randint(1, len(lines)), chance.choice((*_HEAD_LINES, *lines)))
            head = b"\r\n".join(lines)
    return head + end + body


def http_request(header: bytes, payload: bytes) -> bytes:
    """Return an inference request with its head."""
    sizes = {"Content-Length": len(header) + len(payload), "Inference-Header-Content-Length": len(header)}
    return render_request("POST", "/v2/models/teacher/infer", {"Host": "a", **sizes}) + header + payload


def http_answer(header: bytes, payload: bytes, status: int = 200, declared: int | None = None) -> bytes:
    """Return an answer with its head, which may declare another size of the binary part."""
    size = len(header) + (len(payload) if declared is None else declared)
    head = render_response(status, {"Content-Length": size, "Inference-Header-Content-Length": len(header)})
    return head + header + payload


def in_chunks(chance: random.Random, answer: bytes) -> bytes:
    """Return the answer, one in four with its body in chunks."""
    if chance.random() < 0.75:
        return answer
    head, _, body = answer.partition(b"\r\n\r\n")
    parts = []
    while body:
        size = chance.randint(1, len(body))
        parts.append(b"%x\r\n%s\r\n" % (size, body[:size]))
        body = body[size:]
    head = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", head, count=1)
    return head + b"\r\n\r\n" + b"".join(parts) + b"0\r\n\r\n"


def conversation(chance: random.Random) -> bytes:
    """Return what a client sends to a teacher: a request, and perhaps another request or a registration before it."""
    sent = b""
    if chance.random() < 0.20:
        head = render_request("POST", REGISTER_PATH, {"Host": "a", "Content-Length": len(REGISTRATION)})
        sent = head + REGISTRATION
    if chance.random() < 0.30:
        question = render_request(chance.choice(("GET", "POST")), chance.choice(_PATHS), {})
        sent += damaged_head(chance, question)
    tree, payload = request_tree(chance, arrays(chance), shared=bool(sent))
    return sent + damaged_head(chance, http_request(damaged_json(chance, tree), payload))


def answer_tree(outputs: list[Tree]) -> Tree:
    """Return the JSON of an answer with these tensors."""
    return {"model_name": "teacher", "model_version": "1", "outputs": outputs}
