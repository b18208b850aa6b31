"""A cluster of fake nodes and pods, for `benchmarks/scale.py`: kwok's, behind the real API server of KUBECONFIG.

Jobs, Deployments, their controllers and the scheduler are the cluster's own; kwok only tells that a scheduled pod runs.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from kubernetes_asyncio.client import ApiClient

from edl_runtime.backends.kubernetes import manifests, names
from edl_runtime.backends.kubernetes.client import KubernetesClient
from edl_runtime.backends.kubernetes.kubeconfig import connect_by_kubeconfig
from edl_runtime.pods import Pod
from edl_runtime.progress import Progress, publish_progress
from edl_runtime.registry.lease import Lease
from edl_runtime.registry.members import Member
from edl_runtime.specs import Bounds, JobSpec
from edl_runtime.store.keys import Service
from edl_runtime.store.redis_client import connect

KWOK = Path(__file__).parent.parent / ".kwok/kwok"
"""Made by `make kwok`."""

LABEL = "edl-benchmark"
"""Label and taint of the fake nodes: our pods run there only, and others don't."""

TRAINERS, TEACHERS = 4, 5
"""Instances of each training and each pool."""

NODE = {"cpu": "8", "memory": "64Gi", "pods": "110"}
PARALLEL = 32
RUNS_WITHIN_S = 1800.0
NODE_LEASE_S = 160
LEASE_TTL_S = 7200.0

Answer = TypeVar("Answer")


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much there is: `jobs` trainings of 4 instances, `pools` of 5, registered `teachers`."""

    jobs: int
    nodes: int
    pools: int
    teachers: int

    @property
    def pods(self) -> int:
        return self.jobs * TRAINERS + self.pools * TEACHERS

    @property
    def job_names(self) -> list[str]:
        return job_names(self.jobs)

    @property
    def pool_names(self) -> list[str]:
        return [f"pool-{number:04}" for number in range(self.pools)]

    @property
    def growing(self) -> list[str]:
        """The trainings that a pass gives one instance more: a fifth."""
        return self.job_names[::5]


def job_names(count: int) -> list[str]:
    """Return the names of so many trainings."""
    return [f"job-{number:04}" for number in range(count)]


def fake_pod() -> Pod:
    """Return what each instance's pod is given."""
    tolerations = [{"key": LABEL, "operator": "Exists"}]
    return Pod(image="fake", resources={"cpu": 1}, node_selector={LABEL: "yes"}, tolerations=tolerations)


def spec_of(name: str, kind: Any, *, grows: bool = False) -> JobSpec:
    """Return an elastic training or a pool; one that `grows` may have an instance more."""
    size = TRAINERS if kind == "trainer" else TEACHERS
    bounds = Bounds(1, size + grows) if kind == "trainer" else Bounds(size, size + grows)
    elastic = kind == "trainer"
    return JobSpec(name=name, kind=kind, command=("sleep", "1d"), elastic=elastic, instances=size, bounds=bounds)


async def all_of(things: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """Wait for all, PARALLEL at a time."""
    places = asyncio.Semaphore(PARALLEL)

    async def one(thing: Awaitable[Answer]) -> Answer:
        async with places:
            return await thing

    return await asyncio.gather(*map(one, things))


@asynccontextmanager
async def world(size: Size, folder: Path, redis_url: str) -> AsyncIterator[str]:
    """Make it all, and yield its namespace; remove it on exit."""
    namespace = f"edl-scale-{secrets.token_hex(3)}"
    async with connect_by_kubeconfig()() as client:
        with _kwok(folder):
            try:
                await _fill(client, size, namespace)
                await _register(redis_url, namespace, size)
                yield namespace
            finally:
                await _clear(client, size, namespace)


@contextmanager
def _kwok(folder: Path) -> Iterator[None]:
    stages = folder / "stages.yaml"
    stages.write_text("\n---\n".join(map(json.dumps, _stages())))
    command = [KWOK, "--config", stages, f"--manage-nodes-with-label-selector={LABEL}=yes"]
    command += [f"--node-lease-duration-seconds={NODE_LEASE_S}", "--server-address="]
    with (folder / "kwok.log").open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as kwok:
        try:
            yield
        finally:
            kwok.terminate()


def _stages() -> Iterator[dict[str, Any]]:
    """What kwok does to nodes and pods: as a kubelet, but nothing runs."""
    now = "{{ Now | Quote }}"
    true = f'status: "True", lastTransitionTime: {now}'
    yield _stage(
        "node-starts",
        "Node",
        [('.status.conditions.[] | select( .type == "Ready" ) | .status', "NotIn", ["True"])],
        {"statusTemplate": f"conditions: [{{type: Ready, reason: Fake, lastHeartbeatTime: {now}, {true}}}]"},
    )
    gone, phase = ".metadata.deletionTimestamp", ".status.phase"
    conditions = ", ".join(f"{{type: {one}, {true}}}" for one in ("Initialized", "ContainersReady", "Ready"))
    container = "name: instance, image: fake, imageID: fake, restartCount: 0"
    running = f"{{{container}, ready: true, started: true, state: {{running: {{startedAt: {now}}}}}}}"
    ended = f"{{{container}, ready: false, state: {{terminated: {{exitCode: 143, finishedAt: {now}}}}}}}"
    starts = f"phase: Running\nstartTime: {now}\nhostIP: 10.0.0.1\npodIP: 10.0.0.1\nconditions: [{conditions}]\n"
    yield _stage(
        "pod-starts",
        "Pod",
        [(gone, "DoesNotExist", []), (phase, "In", ["Pending"])],
        {"statusTemplate": f"{starts}containerStatuses: [{running}]"},
    )
    yield _stage(
        "pod-ends",
        "Pod",
        [(gone, "Exists", []), (phase, "In", ["Running"])],
        {"statusTemplate": f"phase: Failed\ncontainerStatuses: [{ended}]"},
    )
    yield _stage("pod-leaves", "Pod", [(gone, "Exists", []), (phase, "In", ["Failed"])], {"delete": True})


def _stage(name: str, kind: str, when: list[tuple[str, str, list[str]]], then: dict[str, Any]) -> dict[str, Any]:
    matches = [
        {"key": key, "operator": operator, **({"values": values} if values else {})} for key, operator, values in when
    ]
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": matches},
            "next": then,
        },
    }


async def _fill(client: ApiClient, size: Size, namespace: str) -> None:
    """Create the namespace, nodes, jobs and pools, and wait until all pods run."""
    api, everywhere = KubernetesClient(client, namespace), KubernetesClient(client, "")
    await _send(client, "POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    await all_of(everywhere.create(_node(number)) for number in range(size.nodes))
    await all_of(start(api, spec_of(name, "trainer", grows=name in size.growing)) for name in size.job_names)
    await all_of(start(api, spec_of(name, "pool")) for name in size.pool_names)
    running: set[str] = set()
    async with asyncio.timeout(RUNS_WITHIN_S):
        async for change in api.changes("Pod", labels=names.selector()):
            running |= {one["metadata"]["name"] for one in change.objects if one["status"].get("phase") == "Running"}
            if len(running) == size.pods:
                return


def _node(number: int) -> dict[str, Any]:
    name = f"fake-{number:04}"
    return {
        "kind": "Node",
        "apiVersion": "v1",
        "metadata": {"name": name, "labels": {LABEL: "yes", "kubernetes.io/hostname": name}},
        "spec": {"taints": [{"key": LABEL, "effect": "NoSchedule"}]},
        "status": {"allocatable": NODE, "capacity": NODE},
    }


async def start(api: KubernetesClient, spec: JobSpec) -> None:
    """Create a job as `Backend.submit` does, but for its Secret, and start it."""
    made = manifests.job_manifest(spec, token="benchmark/0", created_at=time.time(), defaults=fake_pod())
    made["metadata"]["annotations"][names.STARTED] = "true"
    made["spec"] |= {"suspend": False} if spec.kind == "trainer" else {"replicas": spec.instances}
    await api.create(made)


async def shrink(namespace: str, size: Size) -> None:
    """Give the growing trainings their first size again, so that a pass has something to do."""
    async with connect_by_kubeconfig()() as client:
        api = KubernetesClient(client, namespace)
        annotations = {names.WANTED: str(TRAINERS), names.RESIZED_AT: None}
        change = {
            "metadata": {"annotations": annotations},
            "spec": {"parallelism": TRAINERS, "completions": TRAINERS, "maxFailedIndexes": TRAINERS - 1},
        }
        await all_of(api.patch({"kind": "Job", "metadata": {"name": name}}, change) for name in size.growing)
        async with asyncio.timeout(RUNS_WITHIN_S):
            async for pods in api.watch("Pod", labels=names.selector()):
                if len(pods) == size.pods:
                    return


async def _register(redis_url: str, namespace: str, size: Size) -> None:
    """Let each training have reported its progress, and register the teachers, evenly over the pools."""
    async with connect(redis_url) as client:
        report = Progress(step=10, total_steps=1000, updated_at=time.time(), samples_per_s=100.0, instances=TRAINERS)
        await all_of(publish_progress(client, namespace, name, report) for name in size.job_names)
        await all_of(
            Lease(  # noqa: SLF001 - not renewed, as that is the load of their own machines
                client,
                Service(namespace, size.pool_names[number % size.pools]),
                Member(id=f"teacher-{number}", address=f"10.0.{number // 250}.{number % 250}:8000"),
                LEASE_TTL_S,
                lambda: None,
            )._register()
            for number in range(size.teachers)
        )


async def _clear(client: ApiClient, size: Size, namespace: str) -> None:
    """Remove all of it; pods of a Job that is left would hold their finalizers for ever."""
    api = KubernetesClient(client, namespace)
    for kind in ("Job", "Deployment"):
        found, _ = await api.list(kind)
        await all_of(api.delete(one) for one in found)
    async with asyncio.timeout(RUNS_WITHIN_S):
        async for pods in api.watch("Pod", labels=names.selector()):
            if not pods:
                break
    await _send(client, "DELETE", f"/api/v1/namespaces/{namespace}")
    await all_of(
        _send(client, "DELETE", f"/api/v1/nodes/{_node(one)['metadata']['name']}") for one in range(size.nodes)
    )


async def _send(client: ApiClient, method: str, path: str, body: Any = None) -> None:
    response = await client.call_api(
        path,
        method,
        body=body,
        header_params={"Content-Type": "application/json", "Accept": "application/json"},
        auth_settings=["BearerToken"],
        _preload_content=False,
        _request_timeout=300,
    )
    async with response:
        if response.status >= 300 and response.status != 404:
            raise RuntimeError(await response.text())
