"""The paths of a teacher, and answers without the model: health, metadata, metrics and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from edl_runtime.protocol.address import has_token
from edl_runtime.protocol.http_heads import PREDICTOR_DIED, RequestHead, render_response
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.protocol.shared_memory import REGISTER_PATH, SHARED_MEMORY_EXTENSION
from edl_runtime.settings import check_token
from edl_runtime.teacher.metrics import CONTENT_TYPE, TeacherMetrics, Totals
from edl_runtime.teacher.predictor.execute import EncodedAnswer


class Reply(NamedTuple):
    """An answer, in JSON unless its headers say otherwise."""

    status: int
    body: bytes
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed


def reply(content: Any, status: int = 200) -> Reply:
    return Reply(status, msgspec.json.encode(content))


def refusal(status: int, reason: str, **headers: str) -> Reply:
    return Reply(status, msgspec.json.encode({"error": reason}), headers)


UNAUTHORIZED = "the bearer token is missing or wrong; it is in EDL_TEACHER_TOKEN"

LEAVING = refusal(503, "this teacher is shutting down; use another one")


def render(answer: Reply, *, keep_alive: bool, method: str = "") -> bytes:
    """Return `answer` as it is sent; to a HEAD request without the body."""
    head = _head(answer.status, len(answer.body), answer.headers, keep_alive=keep_alive)
    return head if method == "HEAD" else head + answer.body


def answer_head(answer: EncodedAnswer, *, keep_alive: bool) -> bytes:
    """Return the head of an answer of the model."""
    headers: dict[str, str | int] = {}
    if answer.json_size is not None:
        headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": answer.json_size}
    if answer.predictor_died:
        headers[PREDICTOR_DIED.decode()] = 1
    return _head(answer.status, answer.size, headers, keep_alive=keep_alive)


def _head(status: int, size: int, more: Mapping[str, str | int], *, keep_alive: bool) -> bytes:
    headers: dict[str, str | int] = {"Content-Type": "application/json", "Content-Length": size}
    if not keep_alive:
        headers["Connection"] = "close"
    return render_response(status, {**headers, **more})


def model_config(signature: ModelSignature) -> dict[str, Any]:
    """Return a model's configuration as Triton describes one; shapes have their batch axis."""

    def described(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [{"name": one.name, "data_type": f"TYPE_{one.datatype}", "dims": one.shape} for one in specs]

    more = {"input": described(signature.inputs), "output": described(signature.outputs)}
    return {"name": signature.name, "platform": signature.platform, "max_batch_size": 0, **more}


def model_statistics(signature: ModelSignature, totals: Totals) -> dict[str, Any]:
    """Return a model's statistics as Triton has them; times are nanoseconds."""
    counts = {"success": totals.answered, "fail": totals.refused, "compute_infer": totals.runs}
    stats = {name: {"count": count, "ns": 0} for name, count in counts.items()}
    stats["compute_infer"]["ns"] = round(totals.busy_s * 1e9)
    return {
        "name": signature.name,
        "version": next(iter(signature.versions), ""),
        "inference_count": totals.rows,
        "execution_count": totals.runs,
        "inference_stats": stats,
    }


class Routes:
    """The paths of one model, and `metrics`. With a `token`, all but health require it as bearer token.

    With `shares_memory`, clients may register memory, and the model's metadata list that extension.
    """

    def __init__(
        self, signature: ModelSignature, token: str = "", *, metrics: TeacherMetrics, shares_memory: bool = False
    ) -> None:
        """Raise SpecError for a token that no client can send."""
        self._metrics = metrics
        if shares_memory:
            signature = msgspec.structs.replace(signature, extensions=(*signature.extensions, SHARED_MEMORY_EXTENSION))
        self._register = frozenset([REGISTER_PATH]) if shares_memory else frozenset()
        self._token = check_token("token", token)
        model = f"/v2/models/{quote(signature.name, safe='')}"
        bases = [model, *(f"{model}/versions/{one}" for one in signature.versions)]
        self._infer = frozenset(f"{base}/infer" for base in bases)
        self._ready = frozenset(["/v2/health/ready", *(f"{base}/ready" for base in bases)])
        about = {"name": "edl-airflow", "version": version("edl-airflow"), "extensions": ["binary_tensor_data"]}
        self._fixed = {
            "/v2": reply(about),
            **dict.fromkeys(bases, reply(signature)),
            **dict.fromkeys((f"{base}/config" for base in bases), reply(model_config(signature))),
        }
        self._stats = frozenset(["/v2/models/stats", *(f"{base}/stats" for base in bases)])
        self._signature = signature
        versions = f" in version {', '.join(signature.versions)}" if signature.versions else ""
        self._served = f"served is model {signature.name!r}{versions}"

    def admits(self, head: RequestHead) -> bool:
        """Whether a request has the token, or none is required."""
        return has_token(head.headers.get(b"authorization", b""), self._token)

    def route(self, head: RequestHead, *, admitted: bool, draining: bool) -> Reply | None:
        """Return the answer, None for requests whose body has to be read."""
        path = head.path
        if head.method == "GET" and path == "/v2/health/live":
            return reply({"live": True})
        if head.method == "GET" and path in self._ready:
            return reply({"ready": not draining}, 503 if draining else 200)
        if not admitted:
            return refusal(401, UNAUTHORIZED, **{"WWW-Authenticate": "Bearer"})
        if path in self._infer or path in self._register:
            return self._refuse_post(head, draining=draining)
        fixed = self._fixed.get(path.removesuffix("/"))
        if path in self._stats:
            fixed = reply({"model_stats": [model_statistics(self._signature, self._metrics.totals())]})
        if path == "/metrics":
            fixed = Reply(200, self._metrics.render(), {"Content-Type": CONTENT_TYPE})
        if fixed is None:
            return refusal(404, f"nothing at {path[:200]}; {self._served}")
        return fixed if head.method == "GET" else refusal(405, f"{head.method} is not allowed here", Allow="GET")

    @staticmethod
    def _refuse_post(head: RequestHead, *, draining: bool) -> Reply | None:
        if head.method != "POST":
            return refusal(405, f"{head.method} is not allowed here", Allow="POST")
        if draining:
            return LEAVING
        if head.headers.get(b"content-encoding", b"identity") != b"identity":
            return refusal(415, "Content-Encoding is not supported; send the body as it is")
        return None
