"""Servers of each protocol that is not ours: they answer a request of one row rightly, and lie about all others."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import grpc
import numpy as np
from support.external_servers import DECLARED

from edl_runtime.protocol.oip_grpc import MESSAGES
from edl_runtime.protocol.paddle_serving import FRAME, GENERAL, PIPELINE, RPC, fill_tensor, frame_sizes, pack_frame
from edl_runtime.protocol.tensors import Array, datatype_of

HUGE = 1 << 40
LIES: dict[str, Callable[[Array], Array]] = {
    "another shape": lambda logits: logits[:, :7],
    "another dtype": lambda logits: logits.astype(np.int64),
    "NaN": lambda logits: logits * np.nan,
    "a row less": lambda logits: logits[:-1],
    "a row more": lambda logits: np.concatenate([logits, logits[:1]]),
}
"""What is answered in place of right logits."""

OTHER_LIES = (
    *("garbage", "no output", "a huge shape", "a huge size", "half an answer"),
    "the answer to another request",
)


class Answer(NamedTuple):
    """Bytes of a body, of how many they are said to be, and of how many that is JSON before tensors."""

    content: bytes
    declared: int
    json_size: int | None = None


class Liar:
    """Answers requests of one protocol: "oip", "paddle-serving", or "paddle-pipeline", whose HTTP is JSON."""

    def __init__(self, protocol: str, lie: str, *, over_http: bool, shape: Sequence[int] = ()) -> None:
        self._lie = lie
        tensors = [{"name": "image", "datatype": "FP32", "shape": shape}] if shape else []
        self.metadata = {"name": "net", "inputs": tensors, "outputs": tensors}
        self._rows, self._answer = {
            "oip": (_oip_rows, _oip_answer) if over_http else (_oip_grpc_rows, _oip_grpc_answer),
            "paddle-serving": (_general_rows, _general_answer),
            "paddle-pipeline": (_json_rows, _json_answer) if over_http else (_pipeline_rows, _pipeline_answer),
        }[protocol]

    def answer(self, request: bytes) -> Answer:
        rows = self._rows(request)
        logits = np.zeros((rows, 10), np.float32)
        true = self._told(logits)
        match self._lie:
            case "garbage":
                return Answer(b"\xff\xfe garbage", 10)
            case _ if rows == 1:
                return true
            case "the answer to another request":
                told = self._to_another(true)
            case "half an answer":
                told = true._replace(content=true.content[: len(true.content) // 2])
            case "a huge size":
                told = true._replace(declared=HUGE)
            case "a huge shape":
                told = self._told(logits, (1 << 30, 10))
            case lie:
                told = self._told(LIES[lie](logits) if lie in LIES else None)
        return told

    def _to_another(self, answer: Answer) -> Answer:
        """Return an answer as an intermediary gives it that mixes up those of the Open Inference Protocol."""
        if answer.json_size is None:
            content = answer.content + MESSAGES["ModelInferResponse"](id="another").SerializeToString()
            return Answer(content, len(content))
        content = b'{"id":"another",' + answer.content[1:]
        more = len(content) - len(answer.content)
        return Answer(content, len(content), answer.json_size + more)

    def _told(self, logits: Array | None, shape: tuple[int, ...] | None = None) -> Answer:
        content, json_size = self._answer(logits, shape)
        return Answer(content, len(content), json_size)


# Rows of a request, and the answer with some logits, perhaps of a false shape, by protocol

Encoded = tuple[bytes, int | None]
Shape = tuple[int, ...] | None


def _oip_rows(request: bytes) -> int:
    found, _ = json.JSONDecoder().raw_decode(request.decode("latin-1"))
    return int(found["inputs"][0]["shape"][0])


def _oip_answer(logits: Array | None, shape: Shape) -> Encoded:
    outputs = []
    if logits is not None:
        size = {"binary_data_size": logits.nbytes}
        head = {"name": "logits", "datatype": datatype_of(logits.dtype), "shape": shape or logits.shape}
        outputs = [{**head, "parameters": size}]
    text = json.dumps({"model_name": "net", "outputs": outputs}).encode()
    return text + (b"" if logits is None else logits.tobytes()), len(text)


def _oip_grpc_rows(request: bytes) -> int:
    return int(MESSAGES["ModelInferRequest"].FromString(request).inputs[0].shape[0])


def _oip_grpc_answer(logits: Array | None, shape: Shape) -> Encoded:
    answer = MESSAGES["ModelInferResponse"](model_name="net")
    if logits is not None:
        answer.outputs.add(name="logits", datatype=datatype_of(logits.dtype), shape=shape or logits.shape)
        answer.raw_output_contents.append(logits.tobytes())
    return answer.SerializeToString(), None


def _general_rows(request: bytes) -> int:
    return int(GENERAL["Request"].FromString(request).tensor[0].shape[0])


def _general_answer(logits: Array | None, shape: Shape) -> Encoded:
    answer = GENERAL["Response"]()
    output = answer.outputs.add()
    if logits is not None:
        tensor = output.tensor.add(name="logits", alias_name="logits")
        fill_tensor(tensor, logits)
        tensor.shape[:] = shape or logits.shape
    return answer.SerializeToString(), None


def _pipeline_rows(request: bytes) -> int:
    return int(PIPELINE["Request"].FromString(request).tensors[0].shape[0])


def _printed(logits: Array | None, shape: Shape) -> dict[str, list[str]]:
    if logits is None:
        return {}
    with np.printoptions(threshold=10**6):
        return {"key": ["logits"], "value": ["[" * 100_000 if shape else repr(logits)]}


def _pipeline_answer(logits: Array | None, shape: Shape) -> Encoded:
    return PIPELINE["Response"](**_printed(logits, shape)).SerializeToString(), None


def _json_rows(request: bytes) -> int:
    return int(json.loads(request)["tensors"][0]["shape"][0])


def _json_answer(logits: Array | None, shape: Shape) -> Encoded:
    return json.dumps({"err_no": 0, **_printed(logits, shape)}).encode(), None


# Servers


@contextmanager
def lying_server(scheme: str, lie: str, shape: Sequence[int] = ()) -> Iterator[str]:
    """Serve during the block; gives the address for a student.

    With a `shape` it is the server that tells its model, all of whose tensors have that.
    """
    protocol, _, carrier = scheme.partition("+")
    liar = Liar(protocol, lie, over_http=carrier == "http", shape=shape)
    serve = {"http": _serving_http, "grpc": _serving_grpc, "brpc": _serving_brpc}[carrier]
    with serve(liar) as port:
        yield f"{scheme}://127.0.0.1:{port}/net{'' if shape else DECLARED}"


@contextmanager
def _serving_http(liar: Liar) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            content = json.dumps(liar.metadata).encode()
            self._send(404 if self.path.endswith("/config") else 200, Answer(content, len(content)))

        def do_POST(self) -> None:
            answer = liar.answer(self.rfile.read(int(self.headers["Content-Length"])))
            self.close_connection = len(answer.content) != answer.declared
            self._send(200, answer)

        def _send(self, status: int, answer: Answer) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(answer.declared))
            if answer.json_size is not None:
                self.send_header("Inference-Header-Content-Length", str(answer.json_size))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with _in_thread(server) as port:
        yield port


@contextmanager
def _serving_brpc(liar: Liar) -> Iterator[int]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while len(head := self.rfile.read(FRAME.size)) == FRAME.size and head.startswith(b"PRPC"):
                size, meta_size = frame_sizes(head, HUGE)
                body = self.rfile.read(size)
                asked = RPC["RpcMeta"].FromString(body[:meta_size])
                answer = liar.answer(body[meta_size:])
                meta = RPC["RpcMeta"](correlation_id=asked.correlation_id)
                meta.response.error_code = 0
                frame = pack_frame(meta, answer.content)
                if answer.declared > len(answer.content):
                    _, sent, of_meta = FRAME.unpack_from(frame)
                    declared = min(sent + answer.declared - len(answer.content), 2**32 - 1)
                    frame = FRAME.pack(b"PRPC", declared, of_meta) + frame[FRAME.size :]
                self.wfile.write(frame)
                if answer.declared > len(answer.content):
                    return

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    with _in_thread(server) as port:
        yield port


@contextmanager
def _in_thread(server: socketserver.TCPServer) -> Iterator[int]:
    server.daemon_threads = True  # type: ignore[attr-defined]  # both kinds have threads
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _serving_grpc(liar: Liar) -> Iterator[int]:
    answers = {
        "ModelReady": lambda _: MESSAGES["ModelReady"](ready=True).SerializeToString(),
        "ModelMetadata": lambda _: MESSAGES["ModelMetadata"](**liar.metadata).SerializeToString(),
        "ModelInfer": lambda request: liar.answer(request).content,
        "inference": lambda request: liar.answer(request).content,
    }

    class Handlers(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            find = answers.get(details.method.rpartition("/")[2])
            return find and grpc.unary_unary_rpc_method_handler(lambda request, _: find(request))

    server = grpc.server(ThreadPoolExecutor(4), handlers=[Handlers()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()
