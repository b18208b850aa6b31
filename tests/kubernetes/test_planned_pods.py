"""Resizes of jobs in a queue of Kueue, on a cluster without Kueue."""

from __future__ import annotations

import msgspec
import pytest
from support.backends.jobs import WAITS, job, reach
from support.cluster.cluster import Cluster

from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.errors import BackendError
from edl_runtime.pods import Pod

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]


async def test_a_job_in_a_queue_of_kueue_stays_suspended_when_it_is_resized(
    backend: KubernetesBackend, cluster: Cluster
) -> None:
    """Only Kueue may start it; this cluster has none."""
    queued = msgspec.structs.replace(job(WAITS, kind="trainer", elastic=True), pod=Pod(queue="gpus"))
    submitted = await backend.submit(queued, token="mine", secrets={})
    assert (submitted.phase, submitted.wanted, submitted.is_suspended) == ("pending", 1, False)
    assert submitted.reason == "suspended: it waits in Kueue's queue 'gpus'"
    assert submitted.scaling is not None
    assert (submitted.scaling.queue, submitted.scaling.resumes) == ("gpus", False)
    with pytest.raises(BackendError, match="in Kueue's queue 'gpus': only Kueue may suspend it"):
        await backend.resize("job", 0)
    resized = await backend.resize("job", 3)
    assert (resized.phase, resized.wanted) == ("pending", 3)
    (owner,) = await cluster.list_objects("jobs")
    assert (owner["spec"]["suspend"], owner["spec"]["completions"]) == (True, 3)


async def test_a_job_in_a_queue_of_kueue_grows_once_all_its_pods_are_admitted(
    backend: KubernetesBackend, cluster: Cluster
) -> None:
    """The test does what Kueue does: it gates the pods, starts the job, and removes a pod's gate."""
    gate = {"spec": {"schedulingGates": [{"name": names.ELASTIC_IN_QUEUE}]}}
    queued = msgspec.structs.replace(job(WAITS, kind="trainer", elastic=True), pod=Pod(queue="gpus", template=gate))
    await backend.submit(queued, token="mine", secrets={})
    merge = "application/merge-patch+json"
    path = f"/apis/batch/v1/namespaces/{cluster.namespace}/jobs/job"
    started = await cluster.request("PATCH", path, {"spec": {"suspend": False}}, content=merge)
    assert started["metadata"]["annotations"][names.ELASTIC_IN_QUEUE] == "true"
    await reach(backend, "job", lambda status: status.reason == "0 of 1 run; 1 waits in Kueue's queue 'gpus'")
    with pytest.raises(BackendError, match="Kueue's queue 'gpus' has yet to admit 1 pod of 'job'"):
        await backend.resize("job", 3)
    (pod,) = await cluster.list_objects("pods")
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{pod['metadata']['name']}"
    await cluster.request("PATCH", path, {"spec": {"schedulingGates": None}}, content=merge)
    await reach(backend, "job", lambda status: status.phase == "running")
    await backend.resize("job", 3)
    await reach(backend, "job", lambda status: len(status.instances) == 3)
