"""What becomes of a job's log when the job is deleted, by a real HTTP server that speaks as the API server does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes_asyncio.client import ApiClient, Configuration

from edl_runtime.backends.kubernetes import KubernetesBackend, api

JOB = {"metadata": {"name": "job", "uid": "one", "resourceVersion": "1", "annotations": {}}}


class Cluster:
    """Has one Job, without pods, in the namespace "ns", and answers for some kinds with a status that refuses."""

    def __init__(self, refuses: dict[str, int]) -> None:
        self.refuses = refuses
        self.jobs = [JOB]
        self.kept: list[Any] = []
        self.closing = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        kind = request.match_info["kind"]
        if kind in self.refuses:
            return web.json_response({"reason": "Refused", "message": f"no {kind}"}, status=self.refuses[kind])
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            await self.closing.wait()
            return response
        if request.method == "DELETE":
            self.jobs = []
        elif request.method == "POST":
            self.kept.append(await request.json())
        elif "name" in request.match_info:
            return web.json_response({}, status=404)
        return web.json_response({"items": self.jobs if kind == "jobs" else [], "metadata": {"resourceVersion": "1"}})

    @asynccontextmanager
    async def backend(self) -> AsyncIterator[KubernetesBackend]:
        app = web.Application()
        for path in ("/{api:api/v1|apis/.*/v1}/namespaces/ns/{kind}", "/{api:.*}/namespaces/ns/{kind}/{name}"):
            app.router.add_route("*", path, self.answer)
        async with TestServer(app) as server:
            configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
            yield KubernetesBackend(lambda: ApiClient(configuration), namespace="ns")
            self.closing.set()


@pytest.mark.parametrize(
    ("refuses", "kept", "cause"),
    [
        ({}, 1, None),
        ({"pods": 403}, 0, "no pods"),
        ({"configmaps": 403}, 0, "no configmaps"),
        ({"configmaps": 503}, 0, "no configmaps"),
    ],
    ids=["nothing is wrong", "nobody may read it", "nobody may keep it", "the cluster is away"],
)
async def test_a_job_is_deleted_though_its_log_is_lost(
    refuses: dict[str, int], kept: int, cause: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is told. A log that could not be read to its end is not kept as if it were all there was."""
    monkeypatch.setattr(api, "OUTAGE_S", 0.0)
    cluster = Cluster(refuses)
    with structlog.testing.capture_logs() as told:
        async with cluster.backend() as backend:
            assert await backend.delete("job")
    assert cluster.jobs == []
    assert len(cluster.kept) == kept
    found = [(one["job"], one["cause"]) for one in told if one["event"] == "log.not_kept"]
    assert len(found) == (cause is not None)
    assert all(job == "job" and str(cause) in why for job, why in found)
