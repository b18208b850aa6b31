"""The JobServer's REST interface, and its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import msgspec
import pytest
from starlette.responses import JSONResponse, StreamingResponse
from support.network.certificates import Authority

from edl_runtime.demo.errors import JobServerRefusedError, JobServerUnavailableError
from edl_runtime.demo.job_server import ScheduledJob
from edl_runtime.demo.pod_sets import Nodes, first_pods
from edl_runtime.demo.rest import JobServerClient, build_app
from edl_runtime.errors import SpecError
from edl_runtime.protocol.asgi_server import open_listener, serving
from edl_runtime.protocol.tls import server_tls_context
from edl_runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

QUERY = "/rest/1.0/get/query_pods?job_id=j"
POD, RUNTIME = "/rest/1.0/post/pod", "/rest/1.0/post/job_runtime_static"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy takes longer for an answer or a request than one may."""
    for limit in ("ANSWER_WITHIN_S", "BODY_WITHIN_S"):
        monkeypatch.setattr(f"edl_runtime.demo.rest.{limit}", 60.0)


def app() -> ASGIApp:
    job = ScheduledJob(Nodes(("127.0.0.1",), pods=2, gpus=2), "j", every_s=1.0, delete=1, add=1)
    return build_app(job.pods, on_pod=job.report_pod, on_runtime=job.report_runtime, token="t0ken")


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": "Bearer t0ken"}
    transport = httpx.ASGITransport(app())
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        yield client


async def test_pods_are_told_as_the_original_does(http: httpx.AsyncClient) -> None:
    """With the same names in JSON; a pod that was reported as ended is not running until it is reported again."""
    told = (await http.get(QUERY)).json()
    assert (told["job_id"], told["job_stage_flag"], len(told["pods"])) == ("j", -1, 2)
    assert list(told["pods"][0]) == ["pod_id", "running", "addr", "pod_port", "trainer_ports", "gpus"]
    for running in (False, True):
        reported = await http.post(POD, json={"job_id": "j", "pod_id": "pod_1_0", "running": running})
        assert reported.json() == {"ret": "succeed"}
        assert [pod["running"] for pod in (await http.get(QUERY)).json()["pods"]] == [True, running]
    estimated = await http.post(RUNTIME, json={"job_id": "j", "estimated_run_time": 90})
    assert (estimated.status_code, estimated.json()) == (200, {"ret": "succeed"})


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "error"),
    [
        ("GET", "/rest/1.0/get/query_pods", None, 400, "job_id is missing"),
        ("GET", "/rest/1.0/get/query_pods?job_id=other", None, 404, "no job 'other' here, but 'j'"),
        ("GET", "/rest/1.0", None, 404, "Not Found"),
        ("GET", POD, None, 405, "Method Not Allowed"),
        ("POST", POD, b"{", 400, "truncated"),
        ("POST", POD, b'{"job_id": "j"}', 400, "missing required field `pod_id`"),
        ("POST", POD, b'{"job_id": "j", "pod_id": "pod_9_0", "running": true}', 404, "no pod 'pod_9_0' in job 'j'"),
        ("POST", RUNTIME, b'{"job_id": "j"}', 400, "missing required field `estimated_run_time`"),
        ("POST", RUNTIME, b'{"job_id": "other", "estimated_run_time": 1}', 404, "no job 'other' here"),
        ("POST", RUNTIME, b" " * 70_000, 413, "at most 65536 bytes"),
    ],
)
async def test_errors_are_json(
    *, http: httpx.AsyncClient, method: str, path: str, body: bytes | None, status: int, error: str
) -> None:
    answer = await http.request(method, path, content=body)
    assert answer.status_code == status
    assert error in answer.json()["error"]


@pytest.mark.parametrize("header", ["", "Bearer wrong", "t0ken"])
async def test_a_wrong_token_is_refused(http: httpx.AsyncClient, header: str) -> None:
    """With the variable that holds the right one."""
    answer = await http.get(QUERY, headers={"Authorization": header})
    assert answer.status_code == 401
    assert "EDL_JOB_SERVER_TOKEN" in answer.json()["error"]


@asynccontextmanager
async def answering(piece: bytes, pause_s: float) -> AsyncIterator[str]:
    """Serve, as no JobServer does, an answer without an end: one `piece` after another. The value is the URL."""

    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield piece
            await asyncio.sleep(pause_s)

    async with serving(StreamingResponse(pieces()), open_listener("127.0.0.1", 0), connections=10) as url:
        yield url


async def test_a_client_does_not_wait_for_an_answer_that_comes_in_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is that of the whole answer, and the server counts as away."""
    monkeypatch.setattr("edl_runtime.demo.rest.ANSWER_WITHIN_S", 0.3)
    async with answering(b" ", 0.01) as url, JobServerClient(url, "j", "") as client:
        with pytest.raises(JobServerUnavailableError, match="no answer within"):
            await client.query_pods()


async def test_a_client_does_not_read_an_endless_answer() -> None:
    """It is no JobServer's."""
    async with answering(b" " * 65536, 0.0) as url, JobServerClient(url, "j", "") as client:
        with pytest.raises(JobServerRefusedError, match="more than 4194304 bytes"):
            await client.query_pods()


@pytest.mark.parametrize(
    ("job_id", "nodes", "why"),
    [
        ("other", Nodes(("localhost",), pods=2, gpus=0), "these are pods of job 'other'"),
        ("j", Nodes(("localhost",), pods=65, gpus=0), "this node would have 65 trainers, and may have 64"),
        ("j", Nodes(("localhost",), pods=5, gpus=65), "this node would have 65 trainers, and may have 64"),
        ("j", Nodes(("192.0.2.250",), pods=200, gpus=200), ""),
    ],
)
async def test_what_one_answer_may_start_is_bounded(job_id: str, nodes: Nodes, why: str) -> None:
    """Another job's pods are not run, and no more trainers on this node than a machine may have."""
    told = JSONResponse(msgspec.to_builtins(first_pods(nodes, job_id)))
    async with serving(told, open_listener("127.0.0.1", 0), connections=10) as url, JobServerClient(url, "j", "") as it:
        if why:
            with pytest.raises(JobServerRefusedError, match=why):
                await it.query_pods()
        else:
            assert len((await it.query_pods()).pods) == 200


async def test_a_client_that_waits_for_pods_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a server does not answer."""
    monkeypatch.setattr("edl_runtime.demo.rest.ANSWER_WITHIN_S", 3600.0)
    stop = asyncio.Event()
    async with answering(b"", 0.01) as url, JobServerClient(url, "j", "") as client:
        waiting = asyncio.create_task(client.wait_for_pods(stop))
        await asyncio.sleep(0)
        stop.set()
        assert await waiting is None


@pytest.mark.parametrize("url", ["redis://h:1", "http://", "http://u:t0ken@h:1", "http://h:port", "http://h:99999"])
def test_an_invalid_url_of_a_server_is_refused(url: str) -> None:
    """With the variable that holds it, and without a password."""
    with pytest.raises(SpecError, match="PADDLE_JOBSERVER") as raised:
        JobServerClient(url, "j", "")
    assert "t0ken" not in str(raised.value)


async def test_https_with_an_authority_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SSL_CERT_FILE names it."""
    authority = Authority(tmp_path / "ours")
    shown = authority.sign("127.0.0.1")
    tls = server_tls_context(RuntimeSettings(tls_cert=str(shown.cert), tls_key=str(shown.key)))
    async with serving(app(), open_listener("127.0.0.1", 0), connections=10, tls=tls) as url:
        async with JobServerClient(url, "j", "t0ken") as client:
            with pytest.raises(JobServerUnavailableError, match="certificate"):
                await client.query_pods()
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
        async with JobServerClient(url, "j", "t0ken") as client:
            assert len((await client.query_pods()).pods) == 2
