"""The student's connection and its socket, against a teacher whose bytes the test chooses."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest

from edl_runtime.errors import SpecError
from edl_runtime.protocol import tensor_stream as streams
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.errors import InferenceError, ProtocolError
from edl_runtime.protocol.infer_messages import RequestIds
from edl_runtime.protocol.tensor_stream import TensorStream
from edl_runtime.protocol.tensors import Array

X = np.zeros((2, 3), np.float32)
CLOSE = "Connection: close\r\n"


def answer(y: Array, *, status: str = "200 OK", headers: str = "", to: str = "") -> bytes:
    """An answer with one binary output, to the request with the id `to`."""
    text = f'{{"id":"{to}","outputs":[{{"name":"y","datatype":"FP32","shape":{list(y.shape)},"parameters":'
    text += f'{{"binary_data_size":{y.nbytes}}}}}]}}'
    size = len(text) + y.nbytes
    head = (
        f"HTTP/1.1 {status}\r\n{headers}Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {size}\r\n\r\n"
    )
    return head.encode() + text.encode() + y.tobytes()


def json_answer(numbers: Sequence[float]) -> bytes:
    text = f'{{"outputs":[{{"name":"y","datatype":"FP32","shape":[{len(numbers)}],"data":{list(numbers)}}}]}}'
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


@contextmanager
def teacher(
    answers: Sequence[Sequence[bytes]], ends: bytes = X.tobytes(), got: bytearray | None = None
) -> Iterator[TeacherConnection]:
    """A connection to a teacher that gives each request the pieces of the next answer, one after the other.

    Requests end with `ends`; what came is added to `got`. It disconnects after an answer that says so.
    """

    def serve() -> None:
        with ExitStack() as stack, suppress(OSError):  # of a test that has failed
            client = None
            for pieces in answers:
                if client is None:
                    client = stack.enter_context(listening.accept()[0])
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                received = bytearray() if got is None else got
                while not received.endswith(ends) or b"\r\n\r\n" not in received[:4096]:
                    part = client.recv(1 << 20)
                    if not part:  # the test has failed
                        return
                    received += part
                for piece in pieces:
                    client.sendall(piece)
                    if len(pieces) > 1:
                        taken.wait(0.01)
                if CLOSE.encode() in pieces[0]:
                    client.close()
                    client = None

    taken = threading.Event()  # never set: it only spaces the pieces
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        host, port = listening.getsockname()
        try:
            with TeacherConnection(f"{host}:{port}", timeout_s=60) as connection:
                yield connection
        finally:
            listening.shutdown(socket.SHUT_RDWR)  # so that nobody is waited for
            thread.join()


def test_answers_that_begin_alike_have_their_own_numbers() -> None:
    """Only numbers differ from the first answer to the next; each call returns fresh arrays with its own."""
    numbers = [np.full((2, 2), value, np.float32) for value in range(4)]
    with teacher([[answer(y)] for y in numbers]) as connection:
        got = [connection.infer({"x": X}, ["y"])["y"] for _ in numbers]
    for array, y in zip(got, numbers, strict=True):
        np.testing.assert_array_equal(array, y)
        assert array.flags.writeable


def test_an_answer_to_another_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers would go to the wrong samples; one without an id is that of a server that keeps none."""
    numbers = [np.full((2, 2), value, np.float32) for value in range(3)]
    names = ["id-0", "id-1", "another"]
    monkeypatch.setattr(RequestIds, "new", lambda _: names.pop(0))
    with teacher([[answer(y, to=f"id-{number}")] for number, y in enumerate(numbers)]) as connection:
        for y in numbers[:2]:
            np.testing.assert_array_equal(connection.infer({"x": X}, ["y"])["y"], y)
        with pytest.raises(ProtocolError, match="the answer has id 'id-2', allowed is 'another'"):
            connection.infer({"x": X}, ["y"])


def test_answers_may_change_their_shape_kind_and_order() -> None:
    """An answer that differs from the last in anything but its numbers is parsed again, and so is the next."""
    small, large = np.ones((2, 2), np.float32), np.full((30, 1000), 5, np.float32)
    script = [answer(small), answer(large), json_answer([1, 2]), json_answer([3, 4]), answer(small), answer(small)]
    with teacher([[one] for one in script]) as connection:
        got = [connection.infer({"x": X}, ["y"])["y"] for _ in script]
    for array, y in zip(got, (small, large, [1, 2], [3, 4], small, small), strict=True):
        np.testing.assert_array_equal(array, y)


def test_answers_may_come_in_any_pieces() -> None:
    """However the network cuts them, known beginnings included."""
    y = np.arange(40_000, dtype=np.float32)
    whole = answer(y)
    cuts = [(1,), (30,), (whole.index(b"{"),), (whole.index(b"}]}") + 3,), (40, 60, 150, len(whole) - 1), ()]
    pieces = [[whole]]
    for places in cuts:
        bounds = (0, *places, len(whole))
        pieces.append([whole[start:end] for start, end in itertools.pairwise(bounds)])
    with teacher(pieces) as connection:
        for _ in pieces:
            np.testing.assert_array_equal(connection.infer({"x": X}, ["y"])["y"], y)


def test_a_refusal_after_answers_is_a_refusal() -> None:
    """The connection stays usable, and what was known of answers still holds."""
    y = np.ones(3, np.float32)
    refusal = b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 19\r\n\r\n{"error":"leaving"}'
    with teacher([[answer(y)], [refusal], [answer(y + 1)]]) as connection:
        connection.infer({"x": X}, ["y"])
        with pytest.raises(InferenceError, match="leaving"):
            connection.infer({"x": X}, ["y"])
        np.testing.assert_array_equal(connection.infer({"x": X}, ["y"])["y"], y + 1)


def test_of_a_traceback_the_last_line_is_the_reason() -> None:
    """As servers that are not ours answer."""
    text = b"Traceback (most recent call last):\n" + b"  File\n" * 99 + b"ValueError: no such model\n"
    refusal = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
    with teacher([[refusal]]) as connection, pytest.raises(InferenceError, match=r"500: ValueError: no such model$"):
        connection.infer({"x": X}, ["y"])


def test_a_teacher_may_disconnect_after_each_answer() -> None:
    """The next request goes over another connection, however often the answer begins as the last."""
    y = np.ones(3, np.float32)
    with teacher([[answer(y, headers=CLOSE)]] * 4) as connection:
        for _ in range(4):
            np.testing.assert_array_equal(connection.infer({"x": X}, ["y"])["y"], y)


def test_an_output_that_was_left_out_is_said_each_time() -> None:
    """Also when the answer begins as one that was right for another call."""
    y = np.ones(3, np.float32)
    with teacher([[answer(y)], [answer(y)]]) as connection:
        connection.infer({"x": X}, ["y"])
        with pytest.raises(ProtocolError, match="left out output 'z'"):
            connection.infer({"x": X}, ["y", "z"])


def test_bytes_behind_an_answer_are_noticed() -> None:
    """Nobody asked for them: the connection is not used again."""
    y = np.ones(3, np.float32)
    with teacher([[answer(y)], [answer(y) + b"more"]]) as connection:
        connection.infer({"x": X}, ["y"])
        connection.infer({"x": X}, ["y"])
        with pytest.raises(ProtocolError, match="more than was requested"):
            connection.infer({"x": X}, ["y"])


def chunked(whole: bytes, *sizes: int) -> bytes:
    """The answer with its body in chunks of these sizes, and one of the rest."""
    head, _, body = whole.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    parts, start = [], 0
    for size in (*sizes, len(body) - sum(sizes)):
        parts.append(b"%x;of=edl\r\n%s\r\n" % (size, body[start : start + size]))
        start += size
    return b"\r\n".join([*lines, b"Transfer-Encoding: chunked", b"", b"".join(parts) + b"0\r\nTrailer: 1\r\n\r\n"])


def test_answers_may_come_in_chunks() -> None:
    """Binary, JSON and refusals; cut within the JSON, a number, and a chunk's head; others before and after."""
    y = np.arange(40_000, dtype=np.float32)
    small = chunked(answer(y[:3]), 10, 90, 3)
    refusal = chunked(b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 19\r\n\r\n{"error":"leaving"}', 5)
    script = [
        [answer(y)],
        [chunked(answer(y), 7, 70_001, 1)],
        [small[:150], small[150:]],
        [chunked(json_answer([1, 2]), 1)],
    ]
    with teacher([*script, [refusal], [chunked(answer(y))], [answer(y)]]) as connection:
        for expected in (y, y, y[:3], [1, 2]):
            np.testing.assert_array_equal(connection.infer({"x": X}, ["y"])["y"], expected)
        with pytest.raises(InferenceError, match="leaving"):
            connection.infer({"x": X}, ["y"])
        for _ in range(2):
            np.testing.assert_array_equal(connection.infer({"x": X}, ["y"])["y"], y)


CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (CHUNKS + b"no size\r\n", "chunk size"),
        (CHUNKS + b"2\r\n{}nothing", "chunk"),
        (CHUNKS + b"f" * 30 + b"\r\n", "(?i)overflow"),
        (CHUNKS + b"2\r\n{}\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n", "follow the last chunk"),
        (CHUNKS.replace(b"chunked", b"gzip"), "Transfer-Encoding 'gzip', allowed is chunked"),
        (CHUNKS.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n"), "Content-Length"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "neither Content-Length nor chunks"),
    ],
)
def test_chunks_that_are_none_are_refused(answer: bytes, named: str) -> None:
    with teacher([[answer]]) as connection, pytest.raises(ProtocolError, match=named):
        connection.infer({"x": X}, ["y"])


def test_chunks_end_at_the_limit_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl_runtime.protocol.client.ANSWER_LIMIT", 1000)
    endless = CHUNKS + b"200\r\n%s\r\n200\r\n%s" % (bytes(512), bytes(512))
    with teacher([[endless]]) as connection, pytest.raises(ProtocolError, match="more than 1000 bytes"):
        connection.infer({"x": X}, ["y"])


@pytest.mark.parametrize("head", [CHUNKS + b"400001\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 4194305\r\n\r\n"])
def test_metadata_ends_at_its_limit(head: bytes) -> None:
    """It is short, and objects made of it are many times as large."""
    refused = pytest.raises(ProtocolError, match="4194304 bytes")
    with teacher([[head + bytes(4194305)]], ends=b"\r\n\r\n") as connection, refused:
        connection.signature()


def test_what_a_teacher_says_is_cut_in_errors() -> None:
    """They are logged."""
    body = b'{"error":"%s"}' % (b"x" * 100_000)
    refusal = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with teacher([[refusal]]) as connection, pytest.raises(InferenceError) as refused:
        connection.infer({"x": X}, ["y"])
    assert refused.value.reason == f"{'x' * 2000}… (100,000 characters)"


def test_rows_beyond_what_one_call_takes_are_all_sent() -> None:
    """A sequence of more rows than the system takes at once, and more bytes than its buffers hold, arrives whole."""
    rows = np.arange(3000 * 2048, dtype=np.float32).reshape(3000, 2048)
    got = bytearray()
    with teacher([[answer(np.ones(3, np.float32))]], ends=rows.tobytes()[-64:], got=got) as connection:
        connection.infer({"x": list(rows)}, ["y"])
    np.testing.assert_array_equal(np.frombuffer(got[-rows.nbytes :], np.float32).reshape(rows.shape), rows)


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"outputs":[]}',
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nInference-Header-Content-Length: 9\r\n\r\n{}",
        b"X" * 20_000,
    ],
)
def test_an_answer_that_is_none_is_refused(answer: bytes) -> None:
    """Garbage, missing lengths, giant claims and left-out outputs raise ProtocolError."""
    with teacher([[answer]]) as connection, pytest.raises(ProtocolError):
        connection.infer({"x": X}, ["y"])


@pytest.mark.parametrize("first", [b"X", b"HTTP/2", b"\r\n", b"\x15\x03\x03\x00\x02"])
def test_first_bytes_that_begin_no_answer_are_refused_at_once(first: bytes) -> None:
    """Nobody waits for the rest, which may never come."""
    with connected(timeout_s=60) as (stream, peer):
        peer.sendall(first)
        peer.shutdown(socket.SHUT_WR)  # else it would be the time limit that ends this where nothing is refused
        stream.begin()
        with pytest.raises(ProtocolError, match=r"allowed is 'HTTP/1\.'"):
            stream.read_head()


def test_a_head_with_a_control_byte_is_refused_at_once() -> None:
    """Nobody waits for its end, which may never come."""
    with connected(timeout_s=60) as (stream, peer):
        peer.sendall(b"HTTP/1.1 200 OK\r\n\x00\xff\xfe")
        peer.shutdown(socket.SHUT_WR)
        stream.begin()
        with pytest.raises(ProtocolError, match=r"control byte b'\\x00'"):
            stream.read_head()


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:0", "host:x"])
def test_an_address_is_host_and_port(address: str) -> None:
    """A wrong address is refused before anything is connected."""
    with pytest.raises(SpecError, match="host:port"):
        TeacherConnection(address)


@contextlib.contextmanager
def connected(timeout_s: float) -> Iterator[tuple[TensorStream, socket.socket]]:
    """A stream, and the socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stream = TensorStream(socket.create_connection(listening.getsockname()), timeout_s)
        with contextlib.closing(stream), listening.accept()[0] as peer:
            yield stream, peer


@contextlib.contextmanager
def trickling(move: Callable[[], object]) -> Iterator[None]:
    """Have the peer move a little again and again."""
    given_up = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not given_up.wait(0.01):
                move()

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        yield
    finally:
        given_up.set()
        thread.join()


def test_an_answer_that_trickles_in_is_given_up_in_time() -> None:
    """What counts is the time of the whole exchange, not that of each piece of it."""
    pieces = itertools.chain([b"HTTP/1.1 200 "], itertools.repeat(b"X"))
    with connected(timeout_s=0.3) as (stream, peer), trickling(lambda: peer.sendall(next(pieces))):
        stream.begin()
        with pytest.raises(TimeoutError, match=r"longer than 0\.3 s"):
            stream.read_head()


@pytest.mark.parametrize("taken", [0, 1 << 18])
def test_a_request_that_is_not_taken_is_given_up_in_time(taken: int) -> None:
    """The teacher reads nothing of it, or a little now and then."""
    with connected(timeout_s=0.3) as (stream, peer), trickling(lambda: taken and peer.recv(taken)):
        size = 64 << 20
        stream.begin()
        with pytest.raises(TimeoutError, match=r"longer than 0\.3 s"):
            stream.send([bytes(size)], size)


def test_the_time_limit_is_for_each_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a connection has been idle."""
    now_s = time.monotonic()
    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: now_s))
    with connected(timeout_s=60) as (stream, peer):
        now_s += 3600
        stream.begin()
        peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        assert stream.read_head().startswith(b"HTTP/1.1 200")
