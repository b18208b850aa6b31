"""Whatever comes from the network is understood or refused; nothing else happens. `make fuzz` tries many more."""

from __future__ import annotations

import os
import random
import re
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from support.depth import examples
from support.fuzzing import messages
from support.fuzzing.messages import SHARED, SIGNATURE
from support.fuzzing.peers import MemorySocket, MemoryTeacher

from edl_runtime.protocol.client import ANSWER_LIMIT, TeacherConnection
from edl_runtime.protocol.errors import InferenceError, ProtocolError
from edl_runtime.protocol.http_heads import CONTENT_LENGTH, JSON_SIZE, ResponseHead
from edl_runtime.protocol.infer_messages import decode_request, decode_response, encode_response
from edl_runtime.protocol.shared_memory import REGION_NAME
from edl_runtime.protocol.tensor_stream import TensorStream
from edl_runtime.protocol.tensors import Array

SEED = int(os.environ.get("EDL_FUZZ_SEED", "2026"))
FIRST = int(os.environ.get("EDL_FUZZ_FIRST", "0"))
END = FIRST + int(os.environ.get("EDL_FUZZ_INPUTS", examples(1_500, 50_000)))
SHARE = 10_000

MOST_S = 2.0
"""How long one input may take."""

MEMORY_TIMES = 64
"""A list in JSON takes two bytes, the object for it about that many times as much."""

MEMORY_BESIDE = 512 * 1024
"""For buffers, caches and messages."""

STATUSES = {100, 200, 400, 401, 404, 405, 411, 413, 415, 431}
FAILURES = (ProtocolError, InferenceError, ConnectionError, TimeoutError)
LENGTH = re.compile(rb"content-length:[ \t]*(\d+)", re.IGNORECASE)
PIECES = (1, 1, 2, 3, 8, 40)


@contextmanager
def at_once_and_bounded(size: int) -> Iterator[None]:
    """Fail when reading so many bytes takes long, or more memory than is in proportion."""
    began = time.thread_time()
    tracemalloc.start()
    try:
        yield
    finally:
        _, taken = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert taken <= MEMORY_TIMES * size + MEMORY_BESIDE
    assert time.thread_time() - began <= MOST_S


def bytes_of(arrays: dict[str, Array]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def read_request(chance: random.Random) -> None:
    """Good ones arrive as they were sent; what is taken for good lies where it may, by another reading of the JSON."""
    arrays = messages.arrays(chance)
    if intact := chance.random() < 0.1:
        inputs, payload = messages.tensors(chance, arrays)
        header = msgspec.json.encode({"inputs": inputs})
        size: int | None = len(header)
    else:
        in_memory = chance.random() < 0.3
        tree, payload = messages.request_tree(chance, arrays, shared=in_memory)
        if chance.random() < 0.1:
            payload = bytes(min(messages.falsify_sizes(chance, tree["inputs"]), 1000))
        header = messages.damaged_json(chance, tree)
        size = None if in_memory else chance.choice((*[len(header)] * 8, None, 0, -1, len(header) - 1, 10**18))
    sent = header + payload if intact else messages.damaged_bytes(chance, header + payload)
    shared = memoryview(bytes(SHARED)) if chance.random() < 0.9 else None
    with at_once_and_bounded(len(sent)):
        try:
            request = decode_request(memoryview(sent), size, SIGNATURE, shared)
        except ProtocolError:
            assert not intact
            return
        with suppress(ProtocolError):  # an answer may be larger than there is room
            outputs = {name: request.inputs.get(name, np.zeros((2, 3))) for name in request.outputs}
            encode_response(SIGNATURE, request, outputs, memoryview(bytearray(1 << 16)))
    for spec in SIGNATURE.inputs:
        array = request.inputs[spec.name]
        assert array.ndim == len(spec.shape)
        assert array.flags.aligned
    with suppress(msgspec.DecodeError, UnicodeDecodeError):  # in what the parser skips
        for tensor in msgspec.json.decode(sent[:size])["inputs"]:
            said = tensor.get("parameters", {})
            if said.get("shared_memory_region") is not None:
                offset, length = said.get("shared_memory_offset", 0), said["shared_memory_byte_size"]
                assert said["shared_memory_region"] == REGION_NAME
                assert 0 <= offset <= offset + length <= SHARED
            if said.get("normalise") is not None:
                assert 1 <= said["normalise"].get("axis", 1) < len(tensor["shape"])
    if intact:
        assert bytes_of(request.inputs) == bytes_of(arrays)


def read_answer(chance: random.Random) -> None:
    """Memory is taken for what follows the JSON, as much as the head declares and no more."""
    arrays = messages.arrays(chance)
    outputs, payload = messages.tensors(chance, arrays)
    tree = messages.answer_tree(outputs)
    size = len(payload)
    if intact := chance.random() < 0.1:
        sent = msgspec.json.encode(tree)
    elif chance.random() < 0.2:
        size = min(messages.falsify_sizes(chance, outputs), ANSWER_LIMIT)
        sent = msgspec.json.encode(tree, enc_hook=str)
    else:
        size = chance.choice((*[size] * 3, 0, size + 8, 1 << 30))
        sent = messages.damaged_bytes(chance, messages.damaged_json(chance, tree))
    with at_once_and_bounded(len(sent) + size):
        try:
            opened, unfilled = decode_response(sent, size)
        except ProtocolError:
            assert not intact
            return
    assert sum(array.nbytes for array in unfilled) == size
    assert len(opened) >= len(unfilled)  # no two have one name
    if intact:
        assert {name: array.shape for name, array in opened.items()} == {
            name: array.shape for name, array in arrays.items()
        }


def split(answered: bytes) -> list[tuple[ResponseHead, bytes]]:
    """Return the answers that came over one connection, each of which is whole."""
    answers = []
    while answered:
        head, end, rest = answered.partition(b"\r\n\r\n")
        parsed = ResponseHead(head + end)
        size = parsed.size(CONTENT_LENGTH) or 0
        assert len(rest) >= size
        assert parsed.status in STATUSES
        if parsed.status != 100:
            answers.append((parsed, rest[:size]))
        answered = rest[size:]
    return answers


def ask_a_teacher(chance: random.Random) -> None:
    """Good requests are answered; pieces and slow clients change nothing; disconnected ones leave nothing behind."""
    expected = []
    if intact := chance.random() < 0.1:
        sent = b""
        for _ in range(chance.randint(1, 3)):
            expected.append(messages.arrays(chance))
            inputs, payload = messages.tensors(chance, expected[-1])
            tree = {"inputs": inputs, "parameters": {"binary_data_output": chance.random() < 0.5}}
            sent += messages.http_request(msgspec.json.encode(tree), payload)
    else:
        sent = b"".join(messages.conversation(chance) for _ in range(chance.randint(1, 3)))
        sent = messages.damaged_bytes(chance, sent)
    pieces, slow = chance.choice(PIECES), chance.random() < 0.5
    with closing(MemoryTeacher()) as teacher:
        with at_once_and_bounded(len(sent)):
            answered = teacher.exchange(sent, pieces, slow=slow)
        assert answered == teacher.exchange(sent)
        teacher.exchange(sent, slow=True, leaves=True)
    answers = split(answered)
    if intact:
        for arrays, (head, body) in zip(expected, answers, strict=True):
            end = head.size(JSON_SIZE) or len(body)
            got, unfilled = decode_response(body[:end], len(body) - end)
            for array in unfilled:
                array.reshape(-1).view(np.uint8)[:] = np.frombuffer(body[end : end + array.nbytes], np.uint8)
                end += array.nbytes
            assert bytes_of(got) == bytes_of(arrays)


def test_a_client_that_sends_on_after_its_last_request_is_read_to_the_end() -> None:
    """Though it takes the answer late, and the read buffer was full meanwhile: what follows is dropped."""
    asked = b"GET /v2 HTTP/1.1\r\nConnection: close\r\n\r\n"
    with closing(MemoryTeacher()) as teacher:
        answered = teacher.exchange(asked + bytes(1 << 18), slow=True)
        assert answered == teacher.exchange(asked)


def hear_a_teacher(chance: random.Random) -> None:
    """A student gets what was sent, in arrays of its own, or one of the errors that it knows."""
    parts, expected, announced = [], [], 0
    intact = chance.random() < 0.1
    for _ in range(chance.randint(1, 3)):
        expected.append(messages.arrays(chance))
        outputs, payload = messages.tensors(chance, expected[-1])
        tree = messages.answer_tree(outputs)
        if intact:
            answer = messages.in_chunks(chance, messages.http_answer(msgspec.json.encode(tree), payload))
        else:
            told = messages.falsify_sizes(chance, outputs) if chance.random() < 0.1 else len(payload)
            status = chance.choice((200, 200, 200, 200, 400, 503))
            answer = messages.http_answer(messages.damaged_json(chance, tree), payload, status, told)
            answer = messages.in_chunks(chance, answer)
            answer = messages.damaged_bytes(chance, messages.damaged_head(chance, answer))
        announced += sum(size for size in map(int, LENGTH.findall(answer)) if size <= ANSWER_LIMIT)
        parts.append(answer)
    connection = TeacherConnection("127.0.0.1:1")
    peer = MemorySocket(parts, chance.choice(PIECES), slow=chance.random() < 0.3)
    connection._link._stream = TensorStream(cast("Any", peer), 1.0)
    with at_once_and_bounded(sum(map(len, parts)) + announced), closing(connection):
        for arrays in expected:
            try:
                got = connection.infer({"mask": np.ones(1, np.bool_)}, list(arrays) if intact else [])
            except FAILURES:
                assert not intact
                if not connection._link.keep:
                    return
            else:
                assert all(array.flags.writeable for array in got.values())
                assert not intact or bytes_of(got) == bytes_of(arrays)
        with suppress(*FAILURES):
            connection.ready()


CHECKS = (*(read_request, read_answer) * 4, ask_a_teacher, hear_a_teacher)
"""Whole ends cost several times as much, and have less that they read by themselves."""


Parser = Callable[..., Any]

EMPTY = [
    {"name": "image", "datatype": "FP32", "shape": [0, 2, 2], "data": []},
    {"name": "tokens", "datatype": "INT64", "shape": [0, 0], "data": []},
    {"name": "mask", "datatype": "BOOL", "shape": [0], "data": []},
]
GOOD: dict[Parser, tuple[Any, ...]] = {
    decode_request: (memoryview(msgspec.json.encode({"inputs": EMPTY})), None, SIGNATURE),
    decode_response: (msgspec.json.encode(messages.answer_tree(EMPTY)), 0),
}


def raises_another_error(parse: Parser, *given: Any) -> Any:
    try:
        return parse(*given)
    except ProtocolError as error:
        raise KeyError(str(error)) from error


def takes_where(refused: str) -> Callable[..., Any]:
    """Take what is refused by these words for a message that is good."""

    def takes(parse: Parser, *given: Any) -> Any:
        try:
            return parse(*given)
        except ProtocolError as error:
            if refused not in str(error):
                raise
            return parse(*GOOD[parse])

    takes.__name__ = refused
    return takes


def refuses_all(_parse: Parser, *_given: Any) -> Any:
    raise ProtocolError("no")


def takes_long(parse: Parser, *given: Any) -> Any:
    end = time.thread_time() + MOST_S
    while time.thread_time() <= end:
        pass
    return parse(*given)


def takes_memory(parse: Parser, *given: Any) -> Any:
    bytearray(64 * MEMORY_BESIDE)
    return parse(*given)


def of_another(parse: Parser, *_given: Any) -> Any:
    return parse(*GOOD[parse])


PARSERS = [
    (read_request, f"{__name__}.decode_request"),
    (read_answer, f"{__name__}.decode_response"),
    (ask_a_teacher, "edl_runtime.teacher.predictor.execute.decode_request"),
    (hear_a_teacher, "edl_runtime.protocol.client.decode_response"),
]
WRONG = [raises_another_error, refuses_all, of_another, takes_long, takes_memory]


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("check", "parser", "wrong"),
    [
        *((*one, wrong) for one in PARSERS for wrong in WRONG),
        (*PARSERS[0], takes_where("the region has")),
        (*PARSERS[0], takes_where("normalise.axis is")),
        (*PARSERS[1], takes_where("bytes follow the JSON")),
    ],
)
@pytest.mark.slow
def test_a_parser_that_is_wrong_is_noticed(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[random.Random], None], parser: str, wrong: Parser
) -> None:
    """Each check can fail, and soon does."""
    parse = decode_request if parser.endswith("decode_request") else decode_response
    monkeypatch.setattr(parser, lambda *given: wrong(parse, *given))
    monkeypatch.setattr(f"{__name__}.MOST_S", 0.2)
    with pytest.raises((AssertionError, KeyError, ProtocolError)):  # noqa: PT012 - by whichever input
        for number in range(2000):
            check(random.Random(number))


@pytest.mark.slow
@pytest.mark.no_cover  # tracing would take longer than all the rest, and find nothing that smaller tests don't
@pytest.mark.parametrize("first", range(FIRST, END, SHARE))
def test_whatever_comes_is_understood_or_refused(first: int) -> None:
    """Damaged, lying and random bytes: no other error, no wait, no memory beyond a bound; good messages arrive."""
    for number in range(first, min(first + SHARE, END)):
        try:
            CHECKS[number % len(CHECKS)](random.Random(f"{SEED}/{number}"))
        except Exception as error:
            error.add_note(f"make fuzz SEED={SEED} FIRST={number} INPUTS=1")
            raise
