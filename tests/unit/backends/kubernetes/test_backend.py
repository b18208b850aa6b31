"""What the backend asks and says, by a real HTTP server that speaks as the API server does."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes_asyncio.client import ApiClient, Configuration
from support.backends.jobs import job

from edl_runtime.backends.errors import JobReplacedError, SubmitError, UnknownJobError
from edl_runtime.backends.kubernetes import client, logs, names
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.errors import BackendError
from edl_runtime.pods import Pod

JOB = {
    "metadata": {
        "name": "job",
        "uid": "one",
        "resourceVersion": "1",
        "labels": names.labels("job", "trainer"),
        "annotations": {},
    },
    "spec": {"completions": 2},
}


HAS_WRITTEN = {
    "metadata": {"name": "job-0", "uid": "pod", "resourceVersion": "1", "labels": {names.JOB: "job"}},
    "status": {
        "phase": "Succeeded",
        "containerStatuses": [{"name": names.CONTAINER, "state": {"terminated": {"exitCode": 0}}}],
    },
}


async def written(_: web.Request) -> web.Response:
    """Answer with the log of that pod."""
    return web.Response(text="2026-01-01T12:00:00Z it has written\n")


class Cluster:
    """Has one Job, and `has` by plural, in the namespace "ns".

    `refuses`: the status of answers for a kind, as "pods", or to one method, as "PATCH pods"; `says`: how.
    """

    def __init__(self, refuses: dict[str, int], *, says: str = "no {}", **has: Any) -> None:
        self.refuses = refuses
        self.says = says
        self.has = {"jobs": [JOB], **has}
        self.kept: list[Any] = []
        self.patched: list[Any] = []
        self.conflicts = 0
        self.requests: list[str] = []
        self.closing = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        kind = request.match_info["kind"]
        if "watch" not in request.query:  # one may begin at any time after its list
            self.requests.append(f"{request.method} {kind}")
        if status := self.refuses.get(kind) or self.refuses.get(f"{request.method} {kind}"):
            return web.json_response({"reason": "Refused", "message": self.says.format(kind)}, status=status)
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            await self.closing.wait()
            for gone in [JOB] if kind == "jobs" and not self.has else []:
                await response.write(json.dumps({"type": "DELETED", "object": gone}).encode() + b"\n")
            return response
        if request.method == "DELETE":
            self.has = {}
            self.closing.set()
        elif request.method == "PATCH" and self.conflicts:
            self.conflicts -= 1
            return web.json_response({"reason": "Conflict", "message": "it has changed"}, status=409)
        elif request.method == "PATCH":
            self.patched.append(await request.json())
            return web.json_response({"kind": "Job", **self.has["jobs"][0]})
        elif request.method == "POST":
            self.kept.append(await request.json())
        elif "name" in request.match_info:
            name, of_kind = request.match_info["name"], self.has.get(kind, [])
            found = [{"kind": "Job", **one} for one in of_kind if one["metadata"]["name"] == name]
            return web.json_response(found[0] if found else {}, status=200 if found else 404)
        return web.json_response({"items": self.has.get(kind, []), "metadata": {"resourceVersion": "1"}})

    @asynccontextmanager
    async def backend(self, **options: Any) -> AsyncIterator[KubernetesBackend]:
        app = web.Application()
        spaces = (r"/{api:api/v1|apis/.*/v1\w*}/namespaces/ns/{kind}", "/{api:.*}/namespaces/ns/{kind}/{name}")
        app.router.add_get("/api/v1/namespaces/ns/pods/job-0/log", written)
        for path in (*spaces, "/api/v1/{kind:nodes}"):
            app.router.add_route("*", path, self.answer)
        async with TestServer(app) as server:
            configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
            yield KubernetesBackend(lambda: ApiClient(configuration), namespace="ns", **options)
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
    monkeypatch.setattr(client, "MAX_OUTAGE_S", 0.0)
    monkeypatch.setattr(logs, "POD_UPDATE_WITHIN_S", 0.1)  # this cluster never says that a container has ended
    cluster = Cluster(refuses, pods=[HAS_WRITTEN])
    with structlog.testing.capture_logs() as told:
        async with cluster.backend() as backend:
            assert await backend.delete("job")
    assert cluster.has == {}
    assert len(cluster.kept) == kept
    found = [(one["job"], one["cause"]) for one in told if one["event"] == "log.archive_failed"]
    assert len(found) == (cause is not None)
    assert all(job == "job" and str(cause) in why for job, why in found)


async def test_where_no_logs_are_kept_nobody_reads_them_or_asks_for_a_config_map() -> None:
    """Neither as a job is deleted, nor for the log of one that was, nor beforehand."""
    cluster = Cluster({"configmaps": 403, "POST deployments": 422}, pods=[HAS_WRITTEN])
    refused = job("print('up')", name="other")
    async with cluster.backend(kept_logs=0, defaults=Pod(image="edl:1")) as backend:
        with pytest.raises(SubmitError, match="no deployments"):
            await backend.submit(refused, token="mine", secrets={})
        assert await backend.delete("job")
        with pytest.raises(UnknownJobError):
            assert [line async for line in backend.logs("job")]
    assert cluster.has == {}
    assert not [request for request in cluster.requests if "configmaps" in request or "pods" in request]


@pytest.mark.parametrize(
    ("status", "says", "lacks_right"),
    [
        (403, 'User "w" cannot create resource "{}" in API group "apps" in the namespace "ns"', True),
        (403, "{} is forbidden: exceeded quota", False),
        (422, "{} cannot be", False),
    ],
)
async def test_a_submit_says_whether_it_lacks_a_right(status: int, says: str, *, lacks_right: bool) -> None:
    """Which no second try will have, while a quota may be free by then."""
    cluster = Cluster({"POST deployments": status}, says=says)
    async with cluster.backend(kept_logs=0, defaults=Pod(image="edl:1")) as backend:
        with pytest.raises(SubmitError, match=re.escape(says.format("deployments"))) as caught:
            await backend.submit(job("print('up')", name="other"), token="mine", secrets={})
    assert caught.value.lacks_right == lacks_right


@pytest.mark.parametrize(("second", "told"), [(1, ""), (3, "its pods can't be created: exceeded quota")])
@pytest.mark.parametrize("followed", [False, True])
async def test_only_what_was_refused_since_the_newest_pod_is_told(second: int, told: str, *, followed: bool) -> None:
    """The cluster keeps events for an hour, and the quota may have been raised long ago."""
    about = {"uid": "pod", "resourceVersion": "1", "labels": {names.JOB: "job"}}
    pod = {"metadata": {**about, "name": "job-0", "creationTimestamp": "2026-01-01T12:00:02Z"}}
    event = {
        "metadata": {"name": "refusal", "uid": "event", "resourceVersion": "1"},
        "involvedObject": {"kind": "Job", "uid": "one"},
        "reason": "FailedCreate",
        "message": "exceeded quota",
        "lastTimestamp": f"2026-01-01T12:00:0{second}Z",
    }
    cluster = Cluster({}, pods=[pod], events=[event])
    async with cluster.backend() as backend:
        if followed:
            async with backend.following() as watching:
                assert (await watching.get("job")).reason == told
        else:
            assert (await backend.get("job")).reason == told


GATE = {"schedulingGates": [{"name": "kueue.x-k8s.io/elastic-job"}]}


def pod_of_job(index: int) -> dict[str, Any]:
    """Return the metadata of one."""
    about = {"name": f"job-{index}", "uid": f"pod-{index}", "resourceVersion": "1", "labels": {names.JOB: "job"}}
    owners = [{"uid": "one", "kind": "Job", "name": "job"}]
    return {**about, "annotations": {names.INDEX: str(index)}, "ownerReferences": owners}


@pytest.mark.parametrize(
    ("refuses", "why"),
    [({}, ": no quota"), ({"workloads": 403}, ""), ({"workloads": 404}, ""), ({"workloads": 500}, "")],
    ids=["Kueue says why", "no right to ask", "no Kueue", "Kueue is away, which converts them"],
)
@pytest.mark.parametrize("followed", [False, True])
async def test_why_a_job_waits_in_its_queue_is_read_where_it_can_be(
    refuses: dict[str, int], why: str, *, followed: bool
) -> None:
    """Of a cluster without a job in a queue, nothing of Kueue's is read."""
    labels = {**names.labels("job", "trainer"), names.QUEUE: "gpus"}
    queued = {"metadata": {**JOB["metadata"], "labels": labels}, "spec": {"completions": 2, "suspend": True}}
    about = {"name": "job-job-5d1f", "uid": "w", "resourceVersion": "1", "labels": {"kueue.x-k8s.io/job-uid": "one"}}
    status = {"conditions": [{"type": "QuotaReserved", "status": "False", "message": "no quota"}]}
    for jobs, reason in (([JOB], ""), ([queued], f"suspended: it waits in Kueue's queue 'gpus'{why}")):
        cluster = Cluster(refuses, jobs=jobs, workloads=[{"metadata": about, "status": status}])
        async with cluster.backend() as backend, backend.following() as watching:
            assert (await (watching if followed else backend).get("job")).reason == reason
        assert ("GET workloads" in cluster.requests) == bool(reason)


@pytest.mark.parametrize(
    ("has", "instances", "refused"),
    [
        (
            {},
            3,
            "Kueue would stop 'job', in its queue 'gpus', if its size changed: resizing needs",
        ),
        ({}, 2, None),
        ({"suspend": True}, 3, None),
        ({"template": {"spec": GATE}}, 3, None),
        ({"template": {"spec": GATE}, "pods": 1}, 3, "Kueue's queue 'gpus' has yet to admit 1 pod of 'job'"),
        ({"template": {"spec": GATE}}, 0, "Kueue's queue 'gpus': only Kueue may suspend it"),
        ({"template": {"spec": GATE}, "waits": True}, 3, "Kueue's queue 'gpus' has yet to admit 1 pod of 'job'"),
        ({"template": {"spec": GATE}, "waits": True}, 1, None),
    ],
    ids=["Kueue too old", "no change", "has not begun", "grows", "no pod yet", "to nothing", "too soon", "shrinks"],
)
async def test_a_job_in_a_queue_has_no_size_for_which_kueue_would_stop_it(
    has: dict[str, Any], instances: int, refused: str | None
) -> None:
    """As Kueue 0.18 does that; the pods of a job that it lets grow have its gate until they are admitted."""
    metadata = {**JOB["metadata"], "labels": {**names.labels("job", "trainer"), names.QUEUE: "gpus"}}
    metadata["annotations"] = {names.WANTED: "2", names.BOUNDS: "1:4", names.STARTED: "true"}
    queued = {"metadata": metadata, "spec": {"completions": 2, "template": {"spec": {}}, **has}}
    waits, count = queued["spec"].pop("waits", False), queued["spec"].pop("pods", 2)
    pods = [{"metadata": pod_of_job(index), "spec": GATE if waits and index else {}} for index in range(count)]
    cluster = Cluster({}, jobs=[queued], pods=pods)
    async with cluster.backend() as backend:
        if refused:
            with pytest.raises(BackendError, match=re.escape(refused)):
                await backend.resize("job", instances)
        else:
            await backend.resize("job", instances)
    assert [one["spec"]["completions"] for one in cluster.patched] == ([] if refused else [instances])


async def test_a_resize_that_was_meant_for_another_try_changes_nothing() -> None:
    """The token is that of the object which the API server then changes, or refuses to change as of another version."""
    metadata = {**JOB["metadata"], "annotations": {names.WANTED: "2", names.BOUNDS: "1:4", names.TOKEN: "try-2"}}
    cluster = Cluster({}, jobs=[{**JOB, "metadata": metadata}], pods=[])
    async with cluster.backend() as backend:
        with pytest.raises(JobReplacedError):
            await backend.resize("job", 3, token="try-1")
        assert cluster.patched == []
        await backend.resize("job", 3, token="try-2")
    assert [one["spec"]["completions"] for one in cluster.patched] == [3]


def resizable(token: str) -> dict[str, Any]:
    metadata = {**JOB["metadata"], "annotations": {names.WANTED: "2", names.BOUNDS: "1:4", names.TOKEN: token}}
    return {**JOB, "metadata": metadata}


async def test_a_followed_job_is_resized_by_one_request() -> None:
    """Which holds for the version that the watches know, so that nothing has to be read before."""
    cluster = Cluster({}, jobs=[resizable("mine")], pods=[])
    async with cluster.backend() as backend, backend.following() as followed:
        await followed.get("job")
        cluster.requests.clear()
        assert (await followed.resize("job", 3)).name == "job"
        assert [one for one in cluster.requests if not one.startswith("GET")] == ["PATCH jobs"]
        assert "GET pods" not in cluster.requests
    assert [(one["metadata"]["resourceVersion"], one["spec"]["completions"]) for one in cluster.patched] == [("1", 3)]


async def test_a_resize_of_what_has_changed_reads_it_first() -> None:
    """The cluster refuses the version that the watches know; what it has now is resized, once."""
    cluster = Cluster({}, jobs=[resizable("mine")], pods=[])
    async with cluster.backend() as backend, backend.following() as followed:
        await followed.get("job")
        changed = resizable("mine")
        changed["metadata"]["resourceVersion"] = "8"
        cluster.has["jobs"], cluster.conflicts = [changed], 1
        await followed.resize("job", 3)
    assert [one["metadata"]["resourceVersion"] for one in cluster.patched] == ["8"]


async def test_no_resize_is_refused_because_of_what_is_known_alone() -> None:
    """Another try may have adopted the job, and the watch has not told it yet."""
    cluster = Cluster({}, jobs=[resizable("try-1")], pods=[])
    async with cluster.backend() as backend, backend.following() as followed:
        await followed.get("job")
        cluster.has["jobs"] = [resizable("try-2")]
        await followed.resize("job", 3, token="try-2")
        assert len(cluster.patched) == 1
        with pytest.raises(JobReplacedError):
            await followed.resize("job", 4, token="try-3")


def left(name: str, *, phase: str = "Failed", finalizers: tuple[str, ...] = (names.TRACKED, "other")) -> dict[str, Any]:
    """Return a pod that is being deleted."""
    about = {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": list(finalizers), "labels": JOB_LABELS}
    return {"metadata": {"name": name, "uid": name, "resourceVersion": "5", **about}, "status": {"phase": phase}}


JOB_LABELS = {**names.labels("job", "trainer"), names.RUN: "one"}


@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize("asked", ["release", "evacuate"])
async def test_pods_that_have_left_a_suspended_job_are_let_go(*, asked: str, followed: bool) -> None:
    """Its finalizer would hold them until the job resumes, and `kubectl drain` waits for them to be gone."""
    earlier = left("of-another")
    earlier["metadata"]["labels"] = {**JOB_LABELS, names.RUN: "two"}
    pods = [left("left"), left("leaves", phase="Running"), left("counted", finalizers=("other",)), earlier]
    for wanted, released in (("0", ["left"]), ("2", [])):
        job = {**JOB, "metadata": {**JOB["metadata"], "annotations": {names.WANTED: wanted}}}
        cluster = Cluster({}, jobs=[job], pods=pods)
        async with cluster.backend() as made, made.following() as watching:
            backend = watching if followed else made
            await (backend.release("job") if asked == "release" else backend.evacuate(["job"]))
            await backend.evacuate(["another"])
        assert [one for one in cluster.requests if one.startswith("PATCH")] == ["PATCH pods"] * len(released)
        freed = {"metadata": {"finalizers": ["other"], "resourceVersion": "5"}}
        assert cluster.patched == [freed] * len(released)


async def test_a_pass_goes_on_where_it_may_not_let_pods_go() -> None:
    """Somebody else may, and what is refused is logged once."""
    job = {**JOB, "metadata": {**JOB["metadata"], "annotations": {names.WANTED: "0"}}}
    cluster = Cluster({"PATCH pods": 403}, jobs=[job], pods=[left("left")])
    async with cluster.backend() as made, made.following() as backend:
        with structlog.testing.capture_logs() as said:
            assert await backend.evacuate() == []
            assert await backend.evacuate() == []
    assert [(one["event"], one["pod"]) for one in said] == [("pod.not_released", "left")]
