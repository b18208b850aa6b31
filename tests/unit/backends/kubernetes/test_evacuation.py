"""Pods leave nodes that are about to go, as a real HTTP server that speaks as the API server does is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes_asyncio.client import ApiClient, Configuration
from structlog.testing import capture_logs

from edl_runtime.backends.kubernetes import backend as backend_module
from edl_runtime.backends.kubernetes import client, informer, names
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.backends.kubernetes.leaving_nodes import LEAVING_TAINTS, leaving_reason

SPOT = "aws-node-termination-handler/spot-itn"
WHY = f"AWS takes it away (taint {SPOT})"
PATIENCE_S = 60.0


def node(name: str, *taints: str, version: str = "1") -> dict[str, Any]:
    spec = {"taints": [{"key": key, "value": "x", "effect": "NoSchedule"} for key in taints]}
    return {"metadata": {"name": name, "uid": name, "resourceVersion": version}, "spec": spec}


def pod(name: str, on: str, job: str = "job", **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "uid": f"uid of {name}", "resourceVersion": "1", "labels": names.labels(job, "trainer")}
    return {"metadata": {**metadata, **more}, "spec": {"nodeName": on}, "status": {"phase": "Running"}}


def owner(job: str, tolerations: list[Any]) -> dict[str, Any]:
    metadata = {"name": job, "uid": f"uid of {job}", "resourceVersion": "1", "labels": names.labels(job, "trainer")}
    return {"metadata": metadata, "spec": {"completions": 2, "template": {"spec": {"tolerations": tolerations}}}}


class Cluster:
    """Nodes and pods; `answers` to evictions by pod, else 201. `changes` of nodes are sent to who watches them."""

    def __init__(self, *nodes: dict[str, Any]) -> None:
        self.nodes = list(nodes)
        self.pods = [
            pod("job-0", "goes"),
            pod("job-1", "stays"),
            pod("other-0", "goes", "other"),
            pod("gone-0", "goes", deletionTimestamp="2026-01-01T00:00:00Z"),
        ]
        self.owners = [owner("job", []), owner("other", [])]
        self.answers: dict[str, int] = {}
        self.cut, self.asked = False, 0
        self.nodes_status, self.is_garbled = 200, False
        self.evicted: list[Any] = []
        self.listed: list[str] = []
        self.changes: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.closing = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        kind = request.match_info["kind"]
        if kind == "nodes" and self.nodes_status != 200:
            return web.json_response({"message": "no nodes"}, status=self.nodes_status)
        if kind == "nodes" and self.is_garbled:
            return web.Response(text="<html>")
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            closing = asyncio.create_task(self.closing.wait())
            while kind == "nodes" and not closing.done():
                change = asyncio.create_task(self.changes.get())
                await asyncio.wait([change, closing], return_when=asyncio.FIRST_COMPLETED)
                if change.done():
                    what = "ERROR" if "code" in change.result() else "MODIFIED"
                    event = {"type": what, "object": change.result()}
                    await response.write(json.dumps(event).encode() + b"\n")
                    if what == "ERROR":
                        return response
            await closing
            return response
        self.listed.append(kind)
        found = {"nodes": self.nodes, "pods": self.pods, "jobs": self.owners}.get(kind, [])
        return web.json_response({"items": found, "metadata": {"resourceVersion": "1"}})

    async def evict(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.asked += 1
        if self.cut and request.transport:
            request.transport.abort()
        status = self.answers.get(request.match_info["name"], 201)
        if status == 201:
            self.evicted.append((asked["kind"], asked["metadata"]["name"], asked["deleteOptions"]["preconditions"]))
        return web.json_response({"message": f"status {status}"}, status=status)

    @asynccontextmanager
    async def backend(self) -> AsyncIterator[KubernetesBackend]:
        app = web.Application()
        app.router.add_post("/api/v1/namespaces/ns/pods/{name}/eviction", self.evict)
        for path in ("/api/v1/{kind:nodes|pods}", "/{api:api/v1|apis/.*/v1}/namespaces/ns/{kind}"):
            app.router.add_get(path, self.answer)
        async with TestServer(app) as server:
            configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
            yield KubernetesBackend(lambda: ApiClient(configuration), namespace="ns")
            self.closing.set()


def evicted(*pods: str) -> list[Any]:
    return [("Eviction", name, {"uid": f"uid of {name}", "resourceVersion": "1"}) for name in pods]


async def first_move(backend: KubernetesBackend) -> list[str]:
    """Look until some of the job's pods have to leave."""
    async with asyncio.timeout(PATIENCE_S):
        while not (done := await backend.evacuate(["job"])):  # noqa: ASYNC110 - the watch tells by this
            await asyncio.sleep(0.01)
    return done


@pytest.mark.parametrize("followed", [False, True])
async def test_pods_are_evicted_from_a_node_whose_taint_says_that_it_goes(*, followed: bool) -> None:
    """Those that are there, and do not leave already; of one job, or of all."""
    cluster = Cluster(node("goes", "gpu", SPOT), node("stays", "gpu"))
    async with cluster.backend() as made, made.following() as watching:
        backend = watching if followed else made
        assert await backend.evacuate(["job"]) == [f"pod job-0 has to leave node goes: {WHY}"]
        assert cluster.evicted == evicted("job-0")
        assert len(await backend.evacuate()) == 2
        assert sorted(cluster.evicted, key=str) == evicted("job-0", "job-0", "other-0")


async def test_nodes_are_watched_once_and_all_pods_for_capacity_alone() -> None:
    """A triggerer that only looks for nodes that go keeps, beside its namespace's jobs, nothing else of the cluster."""
    cluster = Cluster({**node("stays"), "status": {"allocatable": {"cpu": "4"}}})
    async with cluster.backend() as backend, backend.following() as watching:
        assert await watching.evacuate() == []
        ours = ["deployments", "events", "events", "jobs", "nodes", "pods"]
        assert sorted(cluster.listed) == ours
        capacity = await watching.capacity()
        assert [each.name for each in capacity.nodes] == ["stays"]
        assert await watching.evacuate() == []
        assert (cluster.listed.count("nodes"), cluster.listed.count("resourcequotas")) == (1, 1)


async def test_a_follower_hears_of_a_taint_that_comes_later() -> None:
    """By the watch, without asking again."""
    cluster = Cluster(node("goes"), node("stays"))
    async with cluster.backend() as backend, backend.following() as watching:
        assert await watching.evacuate() == []
        cluster.changes.put_nowait(node("goes", SPOT, version="2"))
        assert await first_move(watching) == [f"pod job-0 has to leave node goes: {WHY}"]


@pytest.mark.parametrize("followed", [False, True])
async def test_without_the_right_to_read_nodes_nothing_happens(*, followed: bool) -> None:
    cluster = Cluster(node("goes", SPOT))
    cluster.nodes_status = 403
    async with cluster.backend() as made, made.following() as watching:
        assert await (watching if followed else made).evacuate() == []
    assert cluster.evicted == []


@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize("status", [400, 418, 429, 500, 501, 200], ids=lambda status: f"{status}")
async def test_nodes_that_can_not_be_read_keep_nobody_from_work(
    status: int, monkeypatch: pytest.MonkeyPatch, *, followed: bool
) -> None:
    """Whatever the server says of nodes alone, also what is no answer: their leaving is known once it says so."""
    monkeypatch.setattr(backend_module, "NODES_WAIT_S", 1.0)
    monkeypatch.setattr(informer, "RETRY_AFTER_S", 0.01)
    monkeypatch.setattr(client, "RETRY_DELAYS_S", (0.01, 0.01))
    cluster = Cluster(node("goes", SPOT))
    cluster.nodes_status, cluster.is_garbled = status, status == 200
    async with cluster.backend() as made, made.following() as watching:
        backend = watching if followed else made
        with capture_logs() as told:
            assert await backend.evacuate(["job"]) == []
            assert await backend.evacuate(["job"]) == []
        events = [entry["event"] for entry in told]
        assert [event for event in events if event not in ("cluster.away", "cluster.back")] == ["nodes.not_read"]
        cluster.nodes_status, cluster.is_garbled = 200, False
        assert await first_move(backend) == [f"pod job-0 has to leave node goes: {WHY}"]


@pytest.mark.parametrize("code", [418, 410, 500, "gone", None, []])
async def test_a_watch_of_nodes_that_ends_with_an_error_keeps_nobody_from_work(
    code: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any code, also of none that a number could be: nodes are listed again."""
    monkeypatch.setattr(backend_module, "NODES_WAIT_S", 1.0)
    monkeypatch.setattr(informer, "RETRY_AFTER_S", 0.01)
    cluster = Cluster(node("goes"))
    async with cluster.backend() as made, made.following() as backend:
        assert await backend.evacuate(["job"]) == []
        cluster.nodes = [node("goes", SPOT, version="2")]
        for change in ({"code": code, "message": "an odd one"}, *cluster.nodes):
            cluster.changes.put_nowait(change)
        assert await first_move(backend) == [f"pod job-0 has to leave node goes: {WHY}"]


@pytest.mark.parametrize(("status", "logged"), [(429, 0), (404, 0), (409, 0), (403, 1)])
async def test_a_pod_that_can_not_be_evicted_keeps_no_other(status: int, logged: int) -> None:
    """As for its disruption budget, or because it has changed; a missing right is logged, once for each pod."""
    cluster = Cluster(node("goes", SPOT))
    cluster.answers["job-0"] = status
    with capture_logs() as told:
        async with cluster.backend() as backend:
            assert await backend.evacuate() == [f"pod other-0 has to leave node goes: {WHY}"]
            assert cluster.evicted == evicted("other-0")
            await backend.evacuate(["job"])
    assert [line["event"] for line in told].count("eviction.refused") == logged


@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize(
    ("effect", "tolerations", "leaves"),
    [
        ("NoExecute", [], True),
        ("NoSchedule", [{"key": "gpu", "operator": "Exists"}], True),
        ("NoSchedule", [{"operator": "Exists"}], False),
        ("PreferNoSchedule", [], False),
    ],
)
async def test_a_pod_stays_whose_next_one_may_come_back(
    effect: str, tolerations: list[Any], *, leaves: bool, followed: bool
) -> None:
    """To the same node, where it would be evicted again and again."""
    goes = node("goes", SPOT)
    goes["spec"]["taints"][0]["effect"] = effect
    cluster = Cluster(goes)
    cluster.owners = [owner("job", tolerations), owner("other", [])]
    async with cluster.backend() as made, made.following() as watching:
        await (watching if followed else made).evacuate(["job"])
    assert cluster.evicted == (evicted("job-0") if leaves else [])


async def test_while_the_api_server_is_away_no_further_eviction_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may wait for half a minute, and whoever follows a job waits for it."""
    monkeypatch.setattr(backend_module, "MAX_PARALLEL_EVICTIONS", 1)
    cluster = Cluster(node("goes", SPOT))
    cluster.cut = True
    async with cluster.backend() as backend:
        assert await backend.evacuate() == []
    assert cluster.asked == 1


def test_each_taint_that_says_so_is_known_by_its_key_alone() -> None:
    """Whatever its value and effect; those of GPU nodes and the like are none."""
    for key, why in LEAVING_TAINTS.items():
        assert leaving_reason(node("a", "other", key)) == f"{why} (taint {key})"
    assert leaving_reason(node("a", "nvidia.com/gpu", "node.kubernetes.io/not-ready")) == ""
    assert leaving_reason({"metadata": {"name": "a"}}) == ""
