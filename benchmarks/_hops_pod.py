"""Submits a training to a Kubernetes API that takes everything, looks at it, reads its log and deletes it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes_asyncio.client import ApiClient, Configuration

from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.pods import Pod
from edl_runtime.specs import Bounds, JobSpec

JOB = JobSpec(
    name="train",
    kind="trainer",
    command=("python", "train.py"),
    bounds=Bounds(1, 4),
    instances=2,
    pod=Pod(image="example.com/train:1", resources={"cpu": "1"}),
)
NOW = "2026-01-01T00:00:00Z"
WATCH_S = 0.3


class Cluster:
    """Keeps what is made in it. A Job that is not suspended has pods that run."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:  # noqa: PLR0911 - one for each kind of request
        kind, name = request.match_info["kind"], request.match_info.get("name", "")
        if request.match_info.get("sub") == "log":
            return web.Response(text=f"{NOW} trained\n")
        if "watch" in request.query:
            watch = web.StreamResponse()
            await watch.prepare(request)
            await asyncio.sleep(WATCH_S)
            return watch
        if request.method == "DELETE":
            if "dryRun" not in request.query:
                self.kept.pop(f"{kind}/{name}", None)
            return web.json_response({})
        if request.method == "PATCH" and "apply" not in request.content_type and f"{kind}/{name}" not in self.kept:
            return web.json_response({}, status=404)
        if request.method in ("POST", "PATCH"):
            body = await request.json()
            if isinstance(body, list):
                body = self.set_by(body)
            made = self.merged(self.kept.get(f"{kind}/{name}", {}), body)
            meta = {"uid": "one", "resourceVersion": "1", "creationTimestamp": NOW, "generation": 1}
            made["metadata"] = {**meta, **made.get("metadata", {})}
            if "dryRun" not in request.query:
                self.kept[f"{kind}/{made['metadata'].get('name', name)}"] = made
            return web.json_response(made)
        if name:
            found = self.kept.get(f"{kind}/{name}")
            return web.json_response(found or {}, status=200 if found else 404)
        items = self.pods() if kind == "pods" else [one for key, one in self.kept.items() if key.startswith(f"{kind}/")]
        return web.json_response({"items": items, "metadata": {"resourceVersion": "1"}})

    def merged(self, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        both = {
            key: self.merged(old[key], value) if isinstance(value, dict) and isinstance(old.get(key), dict) else value
            for key, value in new.items()
        }
        return {**old, **both}

    def set_by(self, patch: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what a JSON patch sets; its tests hold here."""
        made: dict[str, Any] = {}
        for each in patch:
            if each["op"] == "add":
                *parts, last = (part.replace("~1", "/") for part in each["path"].split("/")[1:])
                inner: Any = each["value"]
                for part in (last, *reversed(parts)):
                    inner = {part: inner}
                made = self.merged(made, inner)
        return made

    def pods(self) -> list[dict[str, Any]]:
        return [
            {
                "metadata": {
                    **job["spec"]["template"]["metadata"],
                    "name": f"train-{index}",
                    "uid": str(index),
                    "resourceVersion": "1",
                    "creationTimestamp": NOW,
                    "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
                    "ownerReferences": [{"uid": "one", "controller": True, "kind": "Job", "name": "train"}],
                },
                "spec": job["spec"]["template"]["spec"],
                "status": {
                    "phase": "Running",
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "containerStatuses": [
                        {
                            "name": job["spec"]["template"]["spec"]["containers"][0]["name"],
                            "ready": True,
                            "restartCount": 0,
                            "state": {"running": {"startedAt": NOW}},
                        }
                    ],
                },
            }
            for key, job in self.kept.items()
            if key.startswith("jobs/") and not job["spec"].get("suspend")
            for index in range(job["spec"]["completions"])
        ]


async def main() -> None:
    cluster = Cluster()
    app = web.Application()
    for path in ("/api/v1/namespaces/ns/{kind}", "/apis/{group}/v1/namespaces/ns/{kind}"):
        app.router.add_route("*", path, cluster.answer)
        app.router.add_route("*", path + "/{name}", cluster.answer)
        app.router.add_route("*", path + "/{name}/{sub}", cluster.answer)
    async with TestServer(app) as server:
        host = str(server.make_url("")).rstrip("/")
        backend = KubernetesBackend(lambda: ApiClient(Configuration(host=host)), namespace="ns")
        async with backend.following() as followed:
            await followed.submit(JOB, token="by-hand", secrets={})
            status = await followed.get(JOB.name)
            wrote = [line.text async for line in followed.logs(JOB.name)]
            await followed.delete(JOB.name)
    if status.phase != "running" or not wrote or any(key.startswith("jobs/") for key in cluster.kept):
        raise SystemExit(f"not what was to be: {status}, {wrote}, {list(cluster.kept)}")


with Path(os.environ["EDL_HOPS"], "phase").open("r+b") as phase:
    phase.write(b"\1")
asyncio.run(main())
