"""What the backend makes is admitted by the PodSecurity level `restricted`."""

from __future__ import annotations

import pytest
from support.backends.jobs import WAITS, ended, job, says
from support.cluster.cluster import Cluster
from support.cluster.manifests import create

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]


async def test_pools_and_trainers_run_where_restricted_is_enforced(restricted: Cluster) -> None:
    """A pool and an elastic trainer job come up, and the trainers end well; a careless pod is refused."""
    careless = {"containers": [{"name": "main", "image": restricted.image}]}
    with pytest.raises(RuntimeError, match="violates PodSecurity"):
        await create(
            restricted, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "careless"}, "spec": careless}
        )
    backend = restricted.backend()
    await backend.submit(job(WAITS, name="pool", instances=2), token="mine", secrets={"WORD": "x"})
    trainer = job("print('up')", name="trainer", kind="trainer", instances=2, elastic=True)
    await backend.submit(trainer, token="mine", secrets={})
    await says(backend, "up", name="pool", instances=2)
    assert (await ended(backend, "trainer")).phase == "succeeded"
    await says(backend, "up", name="trainer", instances=2)
