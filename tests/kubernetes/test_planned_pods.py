"""What the policy is told of jobs whose pods fare otherwise than their templates say."""

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


async def test_a_job_that_has_never_run_begins_as_soon_as_there_is_room(backend: KubernetesBackend) -> None:
    """That it was suspended while it waited for a node is no pause after which it would have to rest."""
    nowhere = msgspec.structs.replace(job(WAITS, kind="trainer"), pod=Pod(node_selector={"edl-test/place": "none"}))
    await backend.submit(nowhere, token="mine", secrets={})
    suspended = await backend.resize("job", 0)
    assert suspended.scaling is not None
    assert (suspended.is_suspended, suspended.scaling.resized_at) == (True, None)


async def test_a_job_that_waits_in_a_queue_stays_there_whatever_its_size(
    backend: KubernetesBackend, cluster: Cluster
) -> None:
    """On a cluster without Kueue for ever: a resize that let it begin would pass others by."""
    queued = msgspec.structs.replace(job(WAITS, kind="trainer", elastic=True), pod=Pod(labels={names.QUEUE: "gpus"}))
    submitted = await backend.submit(queued, token="mine", secrets={})
    assert (submitted.phase, submitted.wanted, submitted.is_suspended) == ("pending", 1, False)
    assert submitted.reason == "suspended: it waits in Kueue's queue 'gpus'"
    assert submitted.scaling is not None
    assert (submitted.scaling.queue, submitted.scaling.resumes) == ("gpus", False)
    with pytest.raises(BackendError, match="in Kueue's queue 'gpus': only Kueue may suspend it"):
        await backend.resize("job", 0)
    resized = await backend.resize("job", 3)
    assert (resized.phase, resized.wanted) == ("pending", 3)
    (owner,) = await cluster.found("jobs")
    assert (owner["spec"]["suspend"], owner["spec"]["completions"]) == (True, 3)


async def test_a_job_that_runs_in_a_queue_grows_when_all_have_been_admitted(
    backend: KubernetesBackend, cluster: Cluster
) -> None:
    """We do here what Kueue does: gate a job that is made, let it begin, and admit a pod by taking its gate away."""
    gate = {"spec": {"schedulingGates": [{"name": names.ELASTIC_IN_QUEUE}]}}
    queued = msgspec.structs.replace(
        job(WAITS, kind="trainer", elastic=True), pod=Pod(labels={names.QUEUE: "gpus"}, template=gate)
    )
    await backend.submit(queued, token="mine", secrets={})
    merge = "application/merge-patch+json"
    path = f"/apis/batch/v1/namespaces/{cluster.namespace}/jobs/job"
    begun = await cluster.ask("PATCH", path, {"spec": {"suspend": False}}, content=merge)
    assert begun["metadata"]["annotations"][names.ELASTIC_IN_QUEUE] == "true"
    await reach(backend, "job", lambda status: status.reason == "instance 0 waits in Kueue's queue")
    with pytest.raises(BackendError, match="1 pods of 'job' wait in Kueue's queue 'gpus'"):
        await backend.resize("job", 3)
    (pod,) = await cluster.found("pods")
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{pod['metadata']['name']}"
    await cluster.ask("PATCH", path, {"spec": {"schedulingGates": None}}, content=merge)
    await reach(backend, "job", lambda status: status.phase == "running")
    await backend.resize("job", 3)
    await reach(backend, "job", lambda status: len(status.instances) == 3)
