"""The inputs of fuzzing: each is made from a seed and its number alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np
from support.fuzzing import messages
from support.fuzzing.messages import SIGNATURE
from support.fuzzing.mutations import damaged_bytes, damaged_head, damaged_tree, lie

from edl_runtime.protocol.client import ANSWER_LIMIT
from edl_runtime.protocol.http import render_request, render_response
from edl_runtime.protocol.requests import decode_request, encode_request
from edl_runtime.protocol.responses import encode_response
from edl_runtime.protocol.tensors import Array

Target = Literal["request", "answer", "head", "teacher", "student"]
"""What reads it: the parser of requests, of answers, of heads; a teacher's end of a connection, a student's."""

_TURNS: tuple[Target, ...] = (*("request", "answer", "head") * 6, "teacher", "student")
"""Whole ends cost ten times as much, and have less that they read by themselves."""

_INTACT = 0.1
_RANDOM = 0.05


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One input of a parser.

    - `parts`: the bytes; of several for a student, each is what its teacher sends after one request.
    - `size`: what the head tells about them: for a request the length of its JSON, for an answer of what follows it.
    - `shared`: whether the client of a request shares memory.
    - `pieces`: how many the network cuts them into, at most.
    - `slow`: whether the network takes answers, and the model makes them, only after the next piece has come.
    - `expected`: the tensors in each part, for messages that nothing was done to.
    """

    target: Target
    parts: list[bytes]
    size: int | None = None
    shared: bool = False
    pieces: int = 1
    slow: bool = False
    expected: list[dict[str, bytes]] | None = None


def make(seed: int, number: int) -> Case:
    """Return the `number`-th case of a seed."""
    return _MAKERS[_TURNS[number % len(_TURNS)]](random.Random(f"{seed}/{number}"))


def is_worth_tracing(case: Case, number: int) -> bool:
    """Whether to trace memory: of whole ends one in four, for their parsers are traced by themselves."""
    return case.target not in {"teacher", "student"} or number // len(_TURNS) % 4 == 0


def _request(chance: random.Random) -> Case:
    given = messages.arrays(chance)
    if chance.random() < _INTACT:
        header, buffers, _ = encode_request(given, list(given))
        body = header + b"".join(array.tobytes() for array in buffers)
        return Case(target="request", parts=[body], size=len(header), expected=[_bytes_of(given)])
    if chance.random() < 0.2:
        header, _ = _json(chance, messages.shared_tree(chance, given), b"")
        return Case(target="request", parts=[_damaged(chance, header)], shared=chance.random() < 0.9)
    tree, payload = messages.request_tree(chance, given)
    if chance.random() < 0.1:
        payload = bytes(min(max(0, lie(chance, tree["inputs"])), 1000))
    header, payload = _json(chance, tree, payload)
    size = chance.choice((len(header), len(header), len(header), None, 0, -1, len(header) - 1, 10**18))
    return Case(target="request", parts=[_damaged(chance, header + payload)], size=size)


def _answer(chance: random.Random) -> Case:
    given = messages.arrays(chance)
    if chance.random() < _INTACT:
        header, payload = encoded_answer(given)
        return Case(target="answer", parts=[header], size=len(payload), expected=[_bytes_of(given)])
    tree, payload = messages.answer_tree(chance, given)
    if chance.random() < 0.2:
        told = lie(chance, tree["outputs"])
        return Case(target="answer", parts=[messages.json_of(tree)], size=min(max(0, told), ANSWER_LIMIT))
    header, payload = _json(chance, tree, payload)
    size = chance.choice((len(payload), len(payload), len(payload), 0, len(payload) + 8, 1 << 30))
    return Case(target="answer", parts=[_damaged(chance, header)], size=size)


def _head(chance: random.Random) -> Case:
    sizes: dict[str, str | int] = {"Content-Length": chance.randrange(10**6), "Connection": "close"}
    head = render_request("POST", messages.INFER, sizes) if chance.random() < 0.5 else render_response(200, sizes)
    return Case(target="head", parts=[_damaged(chance, damaged_head(chance, head))])


def _teacher(chance: random.Random) -> Case:
    requests, expected = [], []
    intact = chance.random() < _INTACT
    for _ in range(chance.randint(1, 3)):
        given = messages.arrays(chance)
        if intact:
            inputs, payload = messages.tensor_trees(chance, given)
            header = messages.json_of({"inputs": inputs, "parameters": {"binary_data_output": chance.random() < 0.5}})
            expected.append(_bytes_of(given))
        else:
            header, payload = _json(chance, *messages.request_tree(chance, given))
        whole = messages.http_request(header, payload)
        if not intact and chance.random() < 0.2:
            requests.append(messages.http_registration())
            whole = messages.http_request(*_json(chance, messages.shared_tree(chance, given), b"", 0.3))
        if not intact and chance.random() < 0.3:
            question = render_request(chance.choice(("GET", "POST")), chance.choice(messages.QUESTIONS), {"Host": "a"})
            requests.append(damaged_head(chance, question) if chance.random() < 0.3 else question)
        elif not intact and chance.random() < 0.5:
            whole = damaged_head(chance, whole)
        requests.append(whole)
    sent = b"".join(requests)
    if not intact and chance.random() < 0.5:
        sent = _damaged(chance, sent)
    return Case(
        target="teacher",
        parts=[sent],
        pieces=chance.choice((1, 1, 2, 3, 8, 40)),
        slow=chance.random() < 0.5,
        expected=expected if intact else None,
    )


def _student(chance: random.Random) -> Case:
    answers, expected = [], []
    intact = chance.random() < _INTACT
    given = messages.arrays(chance)
    for _ in range(chance.randint(1, 3)):
        if chance.random() < 0.4:
            given = messages.arrays(chance)
        tree, payload = messages.answer_tree(chance, given)
        told = max(0, lie(chance, tree["outputs"])) if not intact and chance.random() < 0.1 else None
        header, payload = encoded_answer(given) if intact else _json(chance, tree, payload, 0.3)
        status = 200 if intact else chance.choice((200, 200, 200, 200, 400, 503))
        answer = messages.http_answer(header, payload, status, told)
        if not intact and chance.random() < 0.4:
            answer = damaged_head(chance, answer)
        answers.append(answer if intact or chance.random() < 0.5 else _damaged(chance, answer))
        expected.append(_bytes_of(given))
    return Case(
        target="student",
        parts=answers,
        pieces=chance.choice((1, 1, 2, 3, 8, 40)),
        slow=chance.random() < 0.3,
        expected=expected if intact else None,
    )


_MAKERS: dict[Target, Callable[[random.Random], Case]] = {
    "request": _request,
    "answer": _answer,
    "head": _head,
    "teacher": _teacher,
    "student": _student,
}


def encoded_answer(given: dict[str, Array]) -> tuple[bytes, bytes]:
    """Return JSON and what follows it of a teacher's answer."""
    header, buffers, _ = encode_request(given, list(given))
    body = header + b"".join(array.tobytes() for array in buffers)
    area = memoryview(bytearray(8192))
    size, end = encode_response(SIGNATURE, decode_request(memoryview(body), len(header), SIGNATURE), given, area)
    return bytes(area[:size]), bytes(area[size:end])


def _json(chance: random.Random, tree: Any, payload: bytes, damage: float = 0.6) -> tuple[bytes, bytes]:
    return messages.json_of(damaged_tree(chance, tree) if chance.random() < damage else tree), payload


def _damaged(chance: random.Random, good: bytes) -> bytes:
    if chance.random() < _RANDOM:
        return chance.randbytes(chance.randint(0, 200))
    if chance.random() < 0.5:
        return good
    other = messages.json_of(messages.request_tree(chance, messages.arrays(chance))[0])
    return damaged_bytes(chance, good, other)


def _bytes_of(given: dict[str, Array]) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(array).tobytes() for name, array in given.items()}
