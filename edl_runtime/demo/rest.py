"""The JobServer's REST interface: its ASGI application, and the client of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from edl_runtime.concurrency import unless_stopped
from edl_runtime.demo.errors import JobServerRefusedError, JobServerUnavailableError
from edl_runtime.demo.node import local_pods
from edl_runtime.demo.pod_sets import PodSet
from edl_runtime.errors import clipped
from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.address import check_http_url

if TYPE_CHECKING:
    import httpx
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

QUERY_PODS = "/rest/1.0/get/query_pods"
POST_RUNTIME = "/rest/1.0/post/job_runtime_static"
POST_POD = "/rest/1.0/post/pod"

BODY_LIMIT = 64 * 1024
"""Most bytes of a request."""
BODY_WITHIN_S = 5.0
"""Longest time to receive it."""
ANSWER_WITHIN_S = 5.0
"""How long a client waits for an answer."""
ANSWER_LIMIT = 4 * 1024 * 1024
"""Most bytes of it."""
MOST_TRAINERS = 64
"""Of one node: what one answer may start."""
POLL_EVERY_S = 1.0
SERVER_WAIT_S = 1800.0
"""How long clients go on without a JobServer."""

T = TypeVar("T")

log = get_logger(__name__)


class RuntimeReport(msgspec.Struct):
    """How long a job is expected to run, in seconds."""

    job_id: str
    estimated_run_time: float


class PodReport(msgspec.Struct):
    """Whether a pod's script runs."""

    job_id: str
    pod_id: str
    running: bool


class Result(msgspec.Struct):
    """The answer to a POST."""

    ret: str = "succeed"


def build_app(
    pods: Callable[[], PodSet],
    *,
    on_pod: Callable[[PodReport], None],
    on_runtime: Callable[[RuntimeReport], None],
    token: str,
) -> ASGIApp:
    """Return the ASGI application; all routes require `token`, unless that is empty. Errors are JSON objects.

    `pods` returns those of now; `on_pod` and `on_runtime` get reports of the job and of its present pods.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.routing import Route

    from edl_runtime.protocol.asgi_server import BearerAuth, http_error_response, json_response, read_body

    def check_job(job_id: str | None) -> PodSet:
        if not job_id:
            raise HTTPException(400, "job_id is missing")
        if job_id != pods().job_id:
            raise HTTPException(404, f"no job {job_id!r} here, but {pods().job_id!r}")
        return pods()

    async def body_of(request: Request, kind: type[T]) -> T:
        try:
            return JsonDecoder(kind).decode(await read_body(request, limit=BODY_LIMIT, within_s=BODY_WITHIN_S))
        except msgspec.DecodeError as error:
            raise HTTPException(400, str(error)) from None

    async def query_pods(request: Request) -> Response:
        return json_response(check_job(request.query_params.get("job_id")))

    async def post_runtime(request: Request) -> Response:
        report = await body_of(request, RuntimeReport)
        check_job(report.job_id)
        on_runtime(report)
        return json_response(Result())

    async def post_pod(request: Request) -> Response:
        report = await body_of(request, PodReport)
        if check_job(report.job_id).rank(report.pod_id) is None:
            raise HTTPException(404, f"no pod {report.pod_id!r} in job {report.job_id!r}")
        on_pod(report)
        return json_response(Result())

    return Starlette(
        routes=[
            Route(QUERY_PODS, query_pods),
            Route(POST_RUNTIME, post_runtime, methods=["POST"]),
            Route(POST_POD, post_pod, methods=["POST"]),
        ],
        middleware=[Middleware(BearerAuth, token=token, variable="EDL_JOB_SERVER_TOKEN")],
        exception_handlers={HTTPException: http_error_response},
    )


class JobServerClient:
    """A client of one job at a JobServer. A context manager. Raises SpecError as `check_http_url`."""

    def __init__(self, url: str, job_id: str, token: str) -> None:
        import httpx

        self.url = check_http_url(url, "PADDLE_JOBSERVER")
        self.job_id = job_id
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(None),  # `_ask` has one for the whole answer
            trust_env=False,  # no proxies; certificates are those of SSL_CERT_FILE
            transport=httpx.AsyncHTTPTransport(verify=self.url.startswith("https:")),
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._client.aclose()

    async def query_pods(self) -> PodSet:
        """Return the job's pods. Raises JobServerUnavailableError and JobServerRefusedError.

        The latter also for those of another job, and for more than `MOST_TRAINERS` on this node.
        """
        pods = await self._ask("GET", QUERY_PODS, PodSet, params={"job_id": self.job_id})
        if pods.job_id != self.job_id:
            raise JobServerRefusedError(self.url, 200, f"these are pods of job {clipped(pods.job_id)!r}")
        trainers = sum(pod.trainers for pod in local_pods(pods).values())
        if trainers > MOST_TRAINERS:
            reason = f"this node would have {trainers} trainers, and may have {MOST_TRAINERS}"
            raise JobServerRefusedError(self.url, 200, reason)
        return pods

    async def wait_for_pods(self, stop: asyncio.Event) -> PodSet | None:
        """Return the job's pods, after a wait of up to `SERVER_WAIT_S` for a server; None when stopped.

        Raises as `query_pods`.
        """
        deadline = time.monotonic() + SERVER_WAIT_S
        while not stop.is_set():
            try:
                return await unless_stopped(stop, self.query_pods())
            except JobServerUnavailableError as error:
                if time.monotonic() >= deadline:
                    raise
                log.warning("server.unavailable", cause=str(error), retry_in_s=POLL_EVERY_S)
            await unless_stopped(stop, asyncio.sleep(POLL_EVERY_S))
        return None

    async def report_pod(self, pod_id: str, *, running: bool) -> None:
        """Report whether a pod's script runs. Raises as `query_pods`."""
        report = PodReport(self.job_id, pod_id, running)
        await self._ask("POST", POST_POD, Result, content=msgspec.json.encode(report))

    async def _ask(self, method: str, path: str, kind: type[T], **request: Any) -> T:
        import httpx

        try:
            async with asyncio.timeout(ANSWER_WITHIN_S), self._client.stream(method, path, **request) as answer:
                content = await self._content(answer)
        except TimeoutError:
            raise JobServerUnavailableError(self.url, f"no answer within {ANSWER_WITHIN_S:.0f} s") from None
        except httpx.HTTPError as error:
            raise JobServerUnavailableError(self.url, str(error) or type(error).__name__) from None
        if answer.is_server_error:
            raise JobServerUnavailableError(self.url, f"it answered {answer.status_code}")
        if not answer.is_success:
            raise JobServerRefusedError(self.url, answer.status_code, _reason(content))
        try:
            return JsonDecoder(kind).decode(content)
        except msgspec.DecodeError as error:
            raise JobServerRefusedError(self.url, answer.status_code, f"it is no JobServer: {error}") from None

    async def _content(self, answer: httpx.Response) -> bytes:
        content = bytearray()
        async for chunk in answer.aiter_raw():
            content += chunk
            if len(content) > ANSWER_LIMIT:
                reason = f"it is no JobServer: it sends more than {ANSWER_LIMIT} bytes"
                raise JobServerRefusedError(self.url, answer.status_code, reason)
        return bytes(content)


class _Refusal(msgspec.Struct):
    error: str


def _reason(body: bytes) -> str:
    try:
        return JsonDecoder(_Refusal).decode(body).error
    except msgspec.DecodeError:
        return "it is no JobServer"
