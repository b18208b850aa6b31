"""How many requests to the API server a change of one job takes: each waits in its queue beside those of all others."""

from __future__ import annotations

from typing import Any

import pytest
from support.backends.jobs import WAITS, job, reach, wait_for_line

from edl_runtime.backends.kubernetes.backend import KubernetesBackend

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

MOST = 10


def attempts(requests: list[str]) -> int:
    """Return how often the job was read: again where its controller has changed it meanwhile."""
    return sum(one.startswith("GET") and one.endswith("/deployments/job") for one in requests)


@pytest.mark.parametrize("kind", ["trainer", "pool"])
async def test_a_change_of_a_job_takes_few_requests(backend: KubernetesBackend, requests: list[str], kind: Any) -> None:
    """A submission rehearses the creation, and nothing else."""
    await backend.submit(job(WAITS, kind=kind, instances=2), token="mine", secrets={"KEY": "x"})
    assert len(requests) <= MOST, requests
    assert len([one for one in requests if "dry run" in one]) == 1, requests
    await wait_for_line(backend, "up", instances=2)
    for instances in (3, 1):
        requests.clear()
        await backend.resize("job", instances)
        assert len(requests) <= MOST * attempts(requests), requests
    await reach(backend, "job", lambda status: [one.phase for one in status.instances] == ["running"])
    requests.clear()
    assert await backend.delete("job")
    of_logs = [one for one in requests if one.endswith("/log")]  # the end of each pod's is read, and followed
    assert len(requests) - len(of_logs) <= MOST * attempts(requests), requests


async def test_a_followed_trainer_job_is_resized_without_being_read_before(
    backend: KubernetesBackend, requests: list[str]
) -> None:
    """It is only read if its controller has changed it meanwhile; and the new size is shown at once."""
    await backend.submit(job(WAITS, kind="trainer", elastic=True), token="mine", secrets={})
    await wait_for_line(backend, "up")
    async with backend.following() as followed:
        await reach(followed, "job", lambda status: [one.phase for one in status.instances] == ["running"])
        for instances in (3, 2):
            requests.clear()
            assert (await followed.resize("job", instances)).wanted == instances
            assert requests[0].startswith("PATCH"), requests
            assert (await followed.get("job")).wanted == instances
        assert (await backend.get("job")).wanted == 2
