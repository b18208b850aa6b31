"""Ways to damage a message: its bytes, the tree of its JSON, the sizes in its head."""

from __future__ import annotations

import random
import re
from typing import Any

import msgspec

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
_NUMBERS = (0, 1, -1, 3, 12, 127, 128, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, 10**30, -(2**63), 0.5, 1e300, -0.0)
_WORDS = ("", "image", "tokens", "mask", "x", "\0", "é\U0001f600", "a" * 300)
_DATATYPES = ("FP32", "INT64", "BOOL", "FP16", "UINT8", "UINT64", "BYTES", "BF16", "fp32", "FP128", "")
_PARAMETERS = (
    *("binary_data_size", "binary_data", "binary_data_output", "top_k", "normalise", "classification", "sequence_id"),
    *("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"),
)


def damaged_bytes(chance: random.Random, good: bytes, other: bytes) -> bytes:
    """Return `good` with up to four pieces changed, cut, doubled, or taken from `other`."""
    bad = bytearray(good)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(bad) + 1)
        upto = min(len(bad), at + chance.choice((0, 1, 1, 4, 30, 1000)))
        match chance.randrange(6):
            case 0 if at < len(bad):
                bad[at] ^= 1 << chance.randrange(8)
            case 1:
                del bad[at:]
            case 2:
                bad[at:upto] = bad[at:upto] * chance.choice((2, 3, 40))
            case 3:
                start = chance.randrange(len(other) + 1)
                bad[at:upto] = other[start : start + chance.choice((1, 8, 60, 4000))]
            case 4:
                bad[at:upto] = chance.randbytes(chance.randint(0, 9))
            case _:
                bad[at:upto] = chance.choice(_TOKENS)
    return bytes(bad)


def damaged_head(chance: random.Random, message: bytes) -> bytes:
    """Return a message of HTTP whose head lies about sizes, or says more than it did."""
    head, end, body = message.partition(b"\r\n\r\n")
    for _ in range(chance.randint(1, 2)):
        sizes = list(re.finditer(rb"(?<=Length: )[^\r]*", head))
        if sizes and chance.random() < 0.6:
            at = chance.choice(sizes)
            said = at.group()
            near = [b"%d" % max(0, int(said) + chance.choice((-8, -1, 1, 8, 64)))] if said.isdigit() else []
            head = head[: at.start()] + chance.choice((*near, *near, *near, *_SIZES)) + head[at.end() :]
        else:
            lines = head.split(b"\r\n")
            lines.insert(chance.randint(1, len(lines)), chance.choice((*_HEAD_LINES, chance.choice(lines))))
            head = b"\r\n".join(lines)
    return head + end + body


def damaged_tree(chance: random.Random, tree: Any) -> Any:
    """Change one to three nodes of some JSON, in place where that is possible; return it."""
    for _ in range(chance.randint(1, 3)):
        place = _place(chance, tree)
        if place is None:
            return _anything(chance, 2)
        parent, key = place
        match chance.randrange(8):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, list):
                parent.insert(key, parent[key])  # a name, an axis, a number that comes twice
            case 2 if isinstance(parent, dict):
                parent[chance.choice((*parent, *_PARAMETERS, *_WORDS))] = parent.pop(key)
            case 3:
                other, where = _place(chance, tree) or place
                parent[key], other[where] = other[where], parent[key]
                if _has_cycle(tree):
                    return _anything(chance, 2)
            case _:
                parent[key] = _other(chance, key, parent[key])
    return tree


def _other(chance: random.Random, key: Any, value: Any) -> Any:
    """Return something that a peer who means harm would put here, or something else altogether."""
    if chance.random() < 0.2:
        return _anything(chance, 3)
    if isinstance(value, bool | int | float):
        return chance.choice((value + 1, value - 1, -value, value * 2, not value, *_NUMBERS))
    if isinstance(value, str):
        return chance.choice(_DATATYPES if key == "datatype" else _WORDS)
    if key == "shape":
        turned = [-axis if isinstance(axis, int) else axis for axis in value] if isinstance(value, list) else []
        more = chance.choices(_NUMBERS, k=chance.choice((0, 1, 2, 3, 31, 32, 33, 64, 65, 300)))
        return chance.choice((more, [*turned, *[1] * chance.choice((0, 30, 62, 65))]))
    if key == "parameters":
        return {chance.choice(_PARAMETERS): _parameter(chance) for _ in range(chance.randint(1, 4))}
    return _anything(chance, 3)


def _parameter(chance: random.Random) -> Any:
    match chance.randrange(4):
        case 0:
            mean, std, axis = chance.choices(_NUMBERS, k=3)
            return {"mean": [mean], "std": [std], "axis": axis}
        case 1:
            return chance.choice(_NUMBERS)
        case 2:
            return chance.choice((True, False, *_WORDS))
        case _:
            return _anything(chance, 2)


def _anything(chance: random.Random, depth: int) -> Any:
    kind = chance.randrange(6 if depth else 2)
    if kind < 2:
        return chance.choice((None, True, False, *_NUMBERS, *_WORDS, *_DATATYPES))
    if kind == 2:
        nested: Any = []
        for _ in range(chance.choice((3, 31, 33, 65, 400))):
            nested = [nested]
        return nested
    if kind == 3:
        return [_anything(chance, 0)] * chance.choice((0, 1, 50, 500))
    if kind == 4:
        return {chance.choice((*_PARAMETERS, *_WORDS)): _anything(chance, depth - 1) for _ in range(3)}
    return [_anything(chance, depth - 1) for _ in range(chance.randint(0, 4))]


def lie(chance: random.Random, tensors: list[dict[str, Any]]) -> int:
    """Change shapes of binary tensors and what is told of their sizes alike; return the sum of what is told."""
    told = [tensor for tensor in tensors if tensor["shape"] and "binary_data_size" in tensor.get("parameters", {})]
    for tensor in told:
        times = chance.choice((-1, -1, 0, 1, 1, 2, 2**20, 2**40, 2**61))
        tensor["shape"][chance.randrange(len(tensor["shape"]))] *= times
        tensor["parameters"]["binary_data_size"] *= times
    total: int = sum(tensor["parameters"]["binary_data_size"] for tensor in told)
    return total


def _place(chance: random.Random, tree: Any) -> tuple[Any, Any] | None:
    """Return a place in a tree, what holds it and its key there; None where there is none."""
    place = None
    while tree and isinstance(tree, dict | list) and (place is None or chance.random() < 0.8):
        key = chance.choice(list(tree)) if isinstance(tree, dict) else chance.randrange(len(tree))
        place = tree, key
        tree = tree[key]
    return place


def _has_cycle(tree: Any) -> bool:
    try:
        msgspec.json.encode(tree, enc_hook=str)
    except RecursionError:
        return True
    return False
