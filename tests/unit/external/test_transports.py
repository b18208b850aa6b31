"""What each protocol's connection says when the server, or what is said of its model, is wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import numpy as np
import pytest

from edl_runtime.external.address import ServerAddress
from edl_runtime.external.grpc_channel import GrpcChannel
from edl_runtime.external.oip_grpc import OipGrpcTransport
from edl_runtime.external.oip_http import OipHttpTransport
from edl_runtime.external.paddle_serving import BrpcCarrier, Carrier, GeneralModel, HttpCarrier, PipelineModel
from edl_runtime.protocol.errors import InferenceError, ModelNotReadyError, ProtocolError
from edl_runtime.protocol.oip_grpc import MESSAGES
from edl_runtime.protocol.paddle_serving import FRAME, GENERAL, PIPELINE, fill_tensor

X = {"x": np.ones((1, 2), np.float32)}
Y = {"y": np.zeros((1, 3), np.float32)}
WHERE = "127.0.0.1:8000"
BINARY_REFUSED = InferenceError(WHERE, 500, "binary is unknown here", retryable=True)
JSON_REFUSED = InferenceError(WHERE, 400, "x is INT64", retryable=False)


class HttpServer:
    """A `TeacherConnection` to a server that answers binary requests and those in JSON so, or raises that."""

    def __init__(self, binary: Any = Y, as_json: Any = Y, page: tuple[int, bytes] = (200, b"")) -> None:
        self.address = WHERE
        self.asked: list[str] = []
        self._answers = {"binary": binary, "json": as_json}
        self._page = page

    def infer(self, *_: object) -> Any:
        return self._answer("binary")

    def infer_json(self, _: bytes) -> Any:
        return self._answer("json")

    def get(self, _: str) -> tuple[int, bytes]:
        return self._page

    def _answer(self, how: str) -> Any:
        self.asked.append(how)
        if isinstance(self._answers[how], Exception):
            raise self._answers[how]
        return self._answers[how]


def over_http(server: HttpServer) -> OipHttpTransport:
    return OipHttpTransport(server)  # type: ignore[arg-type]  # it has the methods that are called


@pytest.mark.parametrize("refusal", [BINARY_REFUSED, ConnectionResetError("closed")])
def test_a_server_without_binary_tensors_gets_json_from_then_on(refusal: Exception) -> None:
    server = HttpServer(binary=refusal)
    transport = over_http(server)
    transport.probe(X, ["y"])
    transport.infer(X, ["y"])
    assert server.asked == ["binary", "json", "json"]


def test_a_server_that_refuses_both_is_not_one_without_binary_tensors() -> None:
    """Its first refusal is the error, and it is not asked in JSON from then on."""
    server = HttpServer(binary=BINARY_REFUSED, as_json=JSON_REFUSED)
    transport = over_http(server)
    with pytest.raises(InferenceError, match=r"127\.0\.0\.1:8000 answered 500: binary is unknown here"):
        transport.probe(X, ["y"])
    with pytest.raises(InferenceError):
        transport.infer(X, ["y"])
    assert server.asked == ["binary", "json", "binary"]


def test_a_large_request_is_not_tried_as_json() -> None:
    """By what the server says of its inputs it would be gigabytes of Python's numbers."""
    server = HttpServer(binary=BINARY_REFUSED)
    with pytest.raises(InferenceError, match="binary is unknown here"):
        over_http(server).probe({f"x{number}": np.zeros((1, 1 << 20), np.uint8) for number in range(5)}, ["y"])
    assert server.asked == ["binary"]


def test_an_output_that_json_leaves_out_is_named() -> None:
    transport = over_http(HttpServer(binary=BINARY_REFUSED))
    transport.probe(X, ["y"])
    with pytest.raises(ProtocolError, match=r"127\.0\.0\.1:8000 left out output 'z'"):
        transport.infer(X, ["y", "z"])


def test_pages_that_say_no_or_nothing_are_told() -> None:
    with pytest.raises(ModelNotReadyError, match="the server answers 404 Model nobody not found"):
        over_http(HttpServer(page=(404, b"Model nobody not found"))).check_ready()
    with pytest.raises(ProtocolError, match=r"127\.0\.0\.1:8000: its model's /config is invalid"):
        over_http(HttpServer(page=(200, b"{"))).max_batch()
    assert over_http(HttpServer(page=(404, b""))).max_batch() is None


class Answers:
    """A channel, or a carrier, whose server answers each call with the next of these messages, or raises it."""

    def __init__(self, *answers: Any) -> None:
        self.address = WHERE
        self.asked: list[str] = []
        self._answers = list(answers)

    def call(self, method: str, request: Any, answer: Any) -> Any:  # noqa: ARG002 - a carrier's signature
        self.asked.append(method.rpartition("/")[2])
        found = self._answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def over_grpc(*answers: Any) -> OipGrpcTransport:
    return OipGrpcTransport(Answers(*answers), "nobody")  # type: ignore[arg-type]  # it has what is called


def test_over_grpc_the_refusal_of_metadata_says_why_a_model_is_not_ready() -> None:
    unknown = InferenceError(WHERE, 404, "unknown model 'nobody'", retryable=False)
    not_ready = MESSAGES["ModelReady"](ready=False)
    for answers in ((unknown,), (not_ready, unknown)):
        with pytest.raises(ModelNotReadyError, match="404: unknown model 'nobody'"):
            over_grpc(*answers).check_ready()
    with pytest.raises(ModelNotReadyError, match="answers that 'nobody' is not ready"):
        over_grpc(not_ready, MESSAGES["ModelMetadata"]()).check_ready()


def test_over_grpc_a_model_that_was_declared_wrongly_is_noticed_by_its_first_row() -> None:
    with pytest.raises(InferenceError, match="x is INT64"):
        over_grpc(JSON_REFUSED).probe(X, ["y"])
    with pytest.raises(ProtocolError, match=r"127\.0\.0\.1:8000 left out output 'y'"):
        over_grpc(MESSAGES["ModelInferResponse"]()).probe(X, ["y"])


PIPELINE_ADDRESS = ServerAddress.parse("paddle-pipeline+grpc://127.0.0.1:8000/net?input=x:FP32:-1.2&output=y:FP32:-1.3")
GENERAL_ADDRESS = ServerAddress.parse("paddle-serving+brpc://127.0.0.1:8000/net?input=x:FP32:-1.2&output=y:FP32:-1.3")


def pipeline(answer: Any, outputs: Sequence[str] = ("y",)) -> Any:
    return PipelineModel(PIPELINE_ADDRESS, Answers(answer)).infer(X, outputs)  # type: ignore[arg-type]


def general(answer: Any, outputs: Sequence[str] = ("y",)) -> Any:
    return GeneralModel(GENERAL_ADDRESS, Answers(answer)).infer(X, outputs)  # type: ignore[arg-type]


def test_refusals_of_paddle_serving_name_the_address_and_the_servers_reason() -> None:
    for ask, messages in ((pipeline, PIPELINE), (general, GENERAL)):
        refusal = messages["Response"](err_no=3002, err_msg="Service name error")
        with pytest.raises(InferenceError, match=r"//127\.0\.0\.1:8000/net.* err_no 3002: Service name error"):
            ask(refusal)
        with pytest.raises(ProtocolError, match=r"//127\.0\.0\.1:8000/net.* left out output 'y'"):
            ask(messages["Response"]())


def test_an_output_that_the_address_does_not_declare_is_named() -> None:
    """A general model sends it all the same; a pipeline's would have no type."""
    answer = GENERAL["Response"]()
    fill_tensor(answer.outputs.add().tensor.add(name="z"), Y["y"])
    assert general(answer, ["z"]).keys() == {"z"}
    with pytest.raises(ProtocolError, match=r"'z' is none of those that paddle-pipeline\+grpc://127"):
        pipeline(PIPELINE["Response"](key=["y", "z"], value=["[[1.]]", "[[1.]]"]), ["z"])


@contextmanager
def dripping(first: bytes) -> Iterator[ServerAddress]:
    """A server that answers these bytes and then one after the other, for as long as somebody takes them."""

    def serve() -> None:
        with suppress(OSError):
            client, _ = listening.accept()
            with client:
                client.sendall(first)
                while not over.wait(0.01):
                    client.sendall(b"x")

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield ServerAddress.parse(f"paddle-serving+brpc://127.0.0.1:{listening.getsockname()[1]}/net")
        finally:
            over.set()
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_an_answer_that_drips_ends_at_the_limit_of_a_request() -> None:
    """However often a byte comes."""
    ways: dict[bytes, Any] = {
        FRAME.pack(b"PRPC", 100_000, 10): BrpcCarrier,
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n": lambda address, timeout_s: HttpCarrier(
            address, "/", timeout_s, as_json=False
        ),
    }
    for first, carrier in ways.items():
        with dripping(first) as address:
            drips: Carrier = carrier(address, 0.2)
            with pytest.raises(TimeoutError, match="longer than"):
                drips.call("/service/inference", GENERAL["Request"](), GENERAL["Response"])
            drips.close()


@contextmanager
def over_a_channel(content: bytes, compression: grpc.Compression) -> Iterator[GrpcChannel]:
    """A channel to a server that answers every call with these bytes."""

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
        def service(self, _: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda *_: content)

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Handlers()], compression=compression)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = GrpcChannel(f"127.0.0.1:{port}")
    try:
        yield channel
    finally:
        channel.close()
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("size", "compression", "problem"),
    [
        (5 << 20, grpc.Compression.NoCompression, r"larger than max \(5242880 vs. 4194304\)"),
        (1_000_001, grpc.Compression.Gzip, "more than 1000000 bytes"),
        (100, grpc.Compression.Gzip, "its answer is no inference.ModelMetadata"),
    ],
)
def test_over_grpc_metadata_has_a_limit(
    size: int, compression: grpc.Compression, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is unpacked."""
    monkeypatch.setattr("edl_runtime.protocol.compression.UNPACKED_LIMIT", 1_000_000)
    with over_a_channel(bytes(size), compression) as channel, pytest.raises(ProtocolError, match=problem) as refused:
        OipGrpcTransport(channel, "net").signature()
    assert channel.address in str(refused.value)
