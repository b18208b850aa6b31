"""The JobServer's REST interface."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from edl_runtime.demo.job_server import ScheduledJob
from edl_runtime.demo.pod_sets import Nodes
from edl_runtime.demo.rest import build_app

QUERY = "/rest/1.0/get/query_pods?job_id=j"
POD, RUNTIME = "/rest/1.0/post/pod", "/rest/1.0/post/job_runtime_static"


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    job = ScheduledJob(Nodes(("127.0.0.1",), pods=2, gpus=2), "j", every_s=1.0, delete=1, add=1)
    app = build_app(job.pods, on_pod=job.report_pod, on_runtime=job.report_runtime, token="t0ken")
    headers = {"Authorization": "Bearer t0ken"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as client:
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
