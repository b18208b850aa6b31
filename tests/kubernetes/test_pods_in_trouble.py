"""Faults of pods: the status names them, and no object of a deleted job remains."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import skip_on_a_laptop
from support.backends.jobs import (
    WAITS,
    WITHIN_S,
    ended,
    eventually,
    job,
    reach,
)
from support.backends.local_processes import below
from support.cluster.cluster import Cluster
from support.cluster.pod_faults import evict, pods_of, priority_class, quota, without_leftovers

from edl_runtime.backends.interface import Backend, JobStatus
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.pods import Pod, Volume
from edl_runtime.specs import JobSpec

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]


BARE_IMAGE = os.environ.get("EDL_TEST_BARE_IMAGE", "docker.io/library/python:3.11-slim")
"""An image with Python and without edl_runtime."""


REASON_WITHIN_S = 120.0
"""How long a status may be without its reason."""


def with_pod(spec: JobSpec, **pod: Any) -> JobSpec:
    return msgspec.structs.replace(spec, pod=Pod(**pod))


def is_up(status: JobStatus) -> bool:
    phases = [one.phase for one in status.instances]
    return phases == ["running"] * status.wanted and not status.reason


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["trainer", "pool"])
async def test_an_image_without_the_runtime_fails_the_job_at_once(backend: Backend, kind: Any) -> None:
    """The reason names the image."""
    await backend.submit(with_pod(job(WAITS, kind=kind), image=BARE_IMAGE), token="mine", secrets={})
    status = await ended(backend, within_s=180)
    assert (status.phase, status.invalid_spec) == ("failed", True)
    assert status.reason == f"instance 0 can't start: its image {BARE_IMAGE} has no edl_runtime"


ENDS_AT_GO = """
import os, pathlib, signal, time
def leave(*_):
    while not (FOLDER / "go").exists():
        time.sleep(0.02)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, leave)
(FOLDER / f"up-{time.time_ns()}").touch()
time.sleep(600)
"""
"""A program that SIGTERM ends once there is FOLDER/go."""


async def test_an_evicted_trainer_is_replaced(backend: Backend, cluster: Cluster, tmp_path: Path) -> None:
    """An eviction is no failure of the script; the status counts it."""
    code = ENDS_AT_GO.replace("FOLDER", f"pathlib.Path({str(tmp_path)!r})")
    await backend.submit(job(code, kind="trainer", elastic=True, grace_s=WITHIN_S), token="mine", secrets={})
    for times in range(2):

        async def has_begun(times: int = times) -> bool:
            return len(below(tmp_path, "up-*")) == times + 1

        await eventually(has_begun, f"begun {times + 1} times")
        await reach(backend, "job", lambda status, times=times: is_up(status) and _restarts(status) == times)
        (tmp_path / "go").unlink(missing_ok=True)  # until the status was seen there is no successor
        assert await evict(cluster, (await pods_of(cluster, "job"))[0])
        count = f"{times + 1} of at most 20"
        reason = f"instance 0 was ended by the cluster (Eviction API: evicting) and is replaced: {count}"
        status = await reach(backend, "job", lambda status, reason=reason: status.reason == reason)
        assert (status.phase, status.invalid_spec, status.instances[0].given_up) == ("running", False, False)
        (tmp_path / "go").touch()
    status = await reach(backend, "job", lambda status: is_up(status) and _restarts(status) == 2)
    assert status.instances[0].disruptions == 2


@pytest.mark.deep
async def test_an_eviction_is_counted_while_there_is_no_successor(home: Cluster) -> None:
    """The Job keeps the evicted pod, and the count in it, until there is a successor."""
    async with without_leftovers(home.backend(), home) as backend:
        await backend.submit(with_pod(job(WAITS, kind="trainer"), disruptions=1), token="mine", secrets={})
        (pod,) = (await reach(backend, "job", is_up)).instances
        async with quota(home, {"pods": "0"}):
            assert await evict(home, pod.pod)
            message = "exceeded quota: tight"
            waiting = await reach(backend, "job", lambda status: status.instances[0].phase == "failed")
            assert [(one.pod, one.disruptions) for one in waiting.instances] == [(pod.pod, 1)]

            async def is_refused() -> bool:
                path = f"/api/v1/namespaces/{home.namespace}/events?fieldSelector=reason=FailedCreate"
                return any(message in event["message"] for event in (await home.request("GET", path))["items"])

            await eventually(is_refused, "a refusal")
            again = await backend.get("job")
            assert (again.phase, again.instances[0].disruptions) == ("running", 1)
        (successor,) = (await reach(backend, "job", is_up, within_s=180)).instances
        assert (successor.pod != pod.pod, successor.disruptions) == (True, 1)


def _restarts(status: JobStatus) -> int:
    return sum(one.restarts for one in status.instances)


@pytest.mark.deep
async def test_a_preempted_trainer_is_replaced(backend: Backend, cluster: Cluster) -> None:
    """It waits while the pod of the higher priority runs."""
    async with priority_class(cluster, 10) as low, priority_class(cluster, 1000) as high:
        all_gpus = await _gpus_of_a_node(cluster)
        spec = with_pod(job(WAITS, kind="trainer", name="low"), resources={"gpu": all_gpus}, priority_class=low)
        await backend.submit(spec, token="mine", secrets={})
        await reach(backend, "low", is_up)
        spec = with_pod(job(WAITS, kind="trainer", name="high"), resources={"gpu": all_gpus}, priority_class=high)
        await backend.submit(spec, token="mine", secrets={})
        await reach(backend, "high", is_up)
        waiting = await reach(backend, "low", lambda status: "Insufficient nvidia.com/gpu" in status.reason)
        assert (waiting.phase, waiting.instances[0].phase) == ("running", "pending")
        await backend.delete("high")
        assert _restarts(await reach(backend, "low", is_up)) == 1


async def _gpus_of_a_node(cluster: Cluster) -> int:
    nodes = (await cluster.request("GET", "/api/v1/nodes"))["items"]
    gpus = max(int(node["status"]["allocatable"].get("nvidia.com/gpu", 0)) for node in nodes)
    if not gpus:
        skip_on_a_laptop("no node of the cluster has, or claims, nvidia.com/gpu")
    return gpus


async def test_a_pool_keeps_all_but_one_while_its_node_is_drained(backend: Backend, cluster: Cluster) -> None:
    """Its PodDisruptionBudget allows one eviction at a time, the next one when the first is replaced."""
    await backend.submit(job(WAITS, instances=3), token="mine", secrets={})
    await reach(backend, "job", is_up)
    before = await pods_of(cluster, "job")

    async def allows_one() -> bool:
        budget = (await cluster.list_objects("poddisruptionbudgets", "job"))[0]
        return bool(budget["status"].get("disruptionsAllowed") == 1)

    await eventually(allows_one, "a budget for one")
    at_once = await asyncio.gather(*(evict(cluster, pod) for pod in before))
    assert at_once.count(True) == 1  # the others are refused until it is replaced
    for pod in (pod for pod, is_evicted in zip(before, at_once, strict=True) if not is_evicted):

        async def has_gone(pod: str = pod) -> bool:
            return await evict(cluster, pod)

        await eventually(has_gone, f"eviction of {pod}")
    status = await reach(backend, "job", is_up)
    assert [one.index for one in status.instances] == [0, 1, 2]
    assert not set(before) & set(await pods_of(cluster, "job"))


async def test_a_job_waits_for_an_exhausted_quota_with_a_reason(home: Cluster) -> None:
    """It starts when the quota is raised, and the reason is gone."""
    async with without_leftovers(home.backend(), home) as backend:
        async with quota(home, {"pods": "1"}):
            await backend.submit(job(WAITS, kind="trainer", instances=2), token="mine", secrets={})
            reason = "exceeded quota: tight, requested: pods=1, used: pods=1, limited: pods=1"
            status = await reach(backend, "job", lambda status: reason in status.reason, REASON_WITHIN_S)
            assert (status.phase, status.invalid_spec) == ("running", False)
        await reach(backend, "job", is_up, within_s=180)


async def test_a_job_waits_for_a_volume_that_can_not_be_mounted_with_a_reason(
    backend: KubernetesBackend, cluster: Cluster
) -> None:
    """From the pod's events, for a followed backend, too; the reason is gone once it runs, though the events remain."""
    secret = "volume-of-job"
    volume = Volume(path="/user", source={"secret": {"secretName": secret}})
    secrets = f"/api/v1/namespaces/{cluster.namespace}/secrets"
    reason = f'secret "{secret}" not found'

    def has_reason(status: JobStatus) -> bool:
        return status.reason.startswith("instance 0 can't start yet: FailedMount: ") and reason in status.reason

    async with backend.following() as followed:
        await backend.submit(with_pod(job(WAITS, kind="trainer"), volumes=[volume]), token="mine", secrets={})
        for way in (backend, followed):
            status = await reach(way, "job", has_reason, REASON_WITHIN_S)
            assert (status.phase, status.invalid_spec, status.instances[0].phase) == ("running", False, "pending")
        assert [has_reason(one) for one in await backend.list()] == [True]
        await cluster.request("POST", secrets, {"metadata": {"name": secret}, "stringData": {"KEY": "value"}})
        for way in (backend, followed):
            await reach(way, "job", is_up, within_s=180)
    await cluster.request("DELETE", f"{secrets}/{secret}")
