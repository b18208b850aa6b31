"""What must hold for every input: it is understood or refused, at once, in bounded memory."""

from __future__ import annotations

import re
import time
import tracemalloc
from contextlib import suppress
from typing import Any, cast

import msgspec
import numpy as np
from support.fuzzing.cases import Case
from support.fuzzing.messages import SHARED, SIGNATURE
from support.fuzzing.peers import AREA, BreachError, MemorySocket, MemoryTeacher

from edl_runtime.errors import InferenceError, ProtocolError
from edl_runtime.protocol.client import ANSWER_LIMIT, TeacherConnection
from edl_runtime.protocol.http import CONTENT_LENGTH, JSON_SIZE, RequestHead, ResponseHead
from edl_runtime.protocol.region import REGION
from edl_runtime.protocol.requests import decode_request
from edl_runtime.protocol.responses import encode_response, open_response
from edl_runtime.protocol.stream import Stream
from edl_runtime.protocol.tensors import Array

MOST_S = 2.0
"""How long one input may take."""

MEMORY_TIMES = 64
"""A list in JSON takes two bytes, the object for it about that many times as much."""

MEMORY_BESIDE = 512 * 1024
"""For buffers, caches and messages."""

_STATUSES = frozenset({100, 200, 400, 401, 404, 405, 411, 413, 415, 431})
_FAILURES = (ProtocolError, InferenceError, ConnectionError, TimeoutError)
_LENGTH = re.compile(rb"content-length:[ \t]*(\d+)", re.IGNORECASE)


class Oracle:
    """Checks inputs, one after the other."""

    def __init__(self) -> None:
        self._teacher = MemoryTeacher()
        self._shared = memoryview(bytes(SHARED))
        self._checks = {
            "request": self._request,
            "answer": self._answer,
            "head": self._head,
            "teacher": self._exchange,
            "student": self._student,
        }

    def close(self) -> None:
        self._teacher.close()

    def check(self, case: Case, *, traces_memory: bool = True) -> None:
        """Raise BreachError unless all holds that has to. Without tracing memory, it takes a third as long."""
        began = time.thread_time()
        if traces_memory:
            tracemalloc.start()
        try:
            self._checks[case.target](case)
        except BreachError:
            raise
        except Exception as error:
            raise BreachError(f"{type(error).__name__} came out: {error}") from error
        finally:
            _, taken = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        took_s = time.thread_time() - began
        allowed = MEMORY_TIMES * sum(map(len, case.parts)) + MEMORY_BESIDE + _announced(case)
        if taken > allowed:
            raise BreachError(f"{taken} bytes of memory were taken, allowed are {allowed}")
        if took_s > MOST_S:
            raise BreachError(f"it took {took_s:.1f} s of CPU, allowed are {MOST_S:g}")

    def _request(self, case: Case) -> None:
        body = memoryview(case.parts[0])
        try:
            request = decode_request(body, case.size, SIGNATURE, self._shared if case.shared else None)
        except ProtocolError:
            _hold(case.expected is None, "a good request was refused")
            return
        for spec in SIGNATURE.inputs:
            array = request.inputs[spec.name]
            _hold(array.ndim == len(spec.shape) and array.flags.aligned, f"input {spec.name!r} has another shape")
        for tensor in _read_again(body[: case.size]):
            _hold_within(tensor)
        _expect(case, 0, request.inputs)
        with suppress(ProtocolError):  # an answer may be larger than there is room
            arrays = {name: request.inputs.get(name, np.zeros((2, 3))) for name in request.outputs}
            encode_response(SIGNATURE, request, arrays, memoryview(bytearray(AREA)))

    def _answer(self, case: Case) -> None:
        payload = case.size or 0
        try:
            arrays, unfilled = open_response(case.parts[0], payload)
        except ProtocolError:
            _hold(case.expected is None, "a good answer was refused")
            return
        _hold(sum(array.nbytes for array in unfilled) == payload, "what follows does not fill the arrays")
        _hold(len(arrays) >= len(unfilled), "two arrays have one name")
        for name, filled in (case.expected or [{}])[0].items():
            _hold(arrays[name].nbytes == len(filled), f"output {name!r} has another size")

    def _head(self, case: Case) -> None:
        for kind in (RequestHead, ResponseHead):
            with suppress(ProtocolError):
                head = kind(case.parts[0])
                for name in (CONTENT_LENGTH, JSON_SIZE):
                    _hold((head.size(name) or 0) >= 0, "a size is negative")

    def _exchange(self, case: Case) -> None:
        (sent,) = case.parts
        answered = self._teacher.exchange(sent, case.pieces, slow=case.slow)
        answers = _split(answered)
        _hold(_STATUSES.issuperset(status for status, _, _ in answers), f"the teacher answered {answered[:300]!r}")
        _hold(answered == self._teacher.exchange(sent), "pieces make a difference to the answer")
        if case.slow:
            self._teacher.exchange(sent, 1, slow=True, leaves=True)
        if case.expected is not None:
            _hold(len(answers) == len(case.expected), f"{len(answers)} answers to {len(case.expected)} requests")
            for number, (_, head, body) in enumerate(answers):
                size = head.size(JSON_SIZE)
                end = len(body) if size is None else size
                arrays, unfilled = open_response(body[:end], len(body) - end)
                for array in unfilled:
                    array.reshape(-1).view(np.uint8)[:] = np.frombuffer(body[end : end + array.nbytes], np.uint8)
                    end += array.nbytes
                _expect(case, number, arrays)

    def _student(self, case: Case) -> None:
        connection = TeacherConnection("127.0.0.1:1")
        peer = MemorySocket(case.parts, case.pieces, slow=case.slow)
        connection._link._stream = Stream(cast("Any", peer), 1.0)
        inputs = {"mask": np.ones(1, np.bool_)}
        for number in range(len(case.parts)):
            try:
                arrays = connection.infer(inputs, list(case.expected[number]) if case.expected else [])
            except _FAILURES as error:
                _hold(case.expected is None, f"a good answer was refused: {error}")
                if not connection._link.keep:
                    return
            else:
                _hold(all(array.flags.writeable for array in arrays.values()), "an array can't be written to")
                _expect(case, number, arrays)
        with suppress(*_FAILURES):
            connection.ready()
        connection.close()


def _read_again(header: memoryview) -> list[dict[str, Any]]:
    """Return the tensors of a request; none where what the parser skips could not be read."""
    try:
        found: list[dict[str, Any]] = msgspec.json.decode(header)["inputs"]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    return found


def _hold_within(tensor: dict[str, Any]) -> None:
    """Raise BreachError unless what was taken for good lies where it may, by a reading of one's own."""
    given = tensor.get("parameters", {})
    if given.get("shared_memory_region") is not None:
        offset, size = given.get("shared_memory_offset", 0), given["shared_memory_byte_size"]
        _hold(0 <= offset <= offset + size <= SHARED, "an input lies outside of what is shared")
        _hold(given["shared_memory_region"] == REGION, "an input lies in what nobody shares")
    if given.get("normalise") is not None:
        _hold(1 <= given["normalise"].get("axis", 1) < len(tensor["shape"]), "there is no such axis to normalise")


def _announced(case: Case) -> int:
    """Return how many bytes a student is told that will come, as far as it believes that."""
    if case.target == "answer":
        return case.size or 0
    if case.target == "student":
        return sum(size for part in case.parts for text in _LENGTH.findall(part) if (size := int(text)) <= ANSWER_LIMIT)
    return 0


def _split(answered: bytes) -> list[tuple[int, ResponseHead, bytes]]:
    answers = []
    while answered:
        head, end, rest = answered.partition(b"\r\n\r\n")
        _hold(bool(end), "an answer ends in its head")
        parsed = ResponseHead(head + end)
        size = parsed.size(CONTENT_LENGTH) or 0
        _hold(len(rest) >= size, "an answer is shorter than it says")
        if parsed.status != 100:
            answers.append((parsed.status, parsed, rest[:size]))
        answered = rest[size:]
    return answers


def _expect(case: Case, number: int, arrays: dict[str, Array]) -> None:
    if case.expected is not None:
        got = {name: array.tobytes() for name, array in arrays.items()}
        _hold(got == case.expected[number], "what was decoded is not what was encoded")


def _hold(condition: bool, otherwise: str) -> None:  # noqa: FBT001
    if not condition:
        raise BreachError(otherwise)
