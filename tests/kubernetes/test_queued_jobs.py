"""Jobs that Kueue lets begin, on a cluster without one: they wait for ever."""

from __future__ import annotations

import msgspec
import pytest
from support.backends.jobs import WAITS, job
from support.cluster.cluster import Cluster

from edl_runtime.backends.kubernetes import names
from edl_runtime.errors import BackendError
from edl_runtime.pods import Pod

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]


async def test_a_job_that_waits_in_a_queue_stays_there_whatever_its_size(cluster: Cluster) -> None:
    """Others would be passed by if a resize let it begin; and Kueue would let it go on if it was suspended here."""
    backend = cluster.backend()
    queued = msgspec.structs.replace(job(WAITS, kind="trainer", elastic=True), pod=Pod(labels={names.QUEUE: "gpus"}))
    submitted = await backend.submit(queued, token="mine", secrets={})
    try:
        assert (submitted.phase, submitted.wanted, submitted.is_suspended) == ("pending", 1, False)
        assert submitted.reason == "suspended: it waits in Kueue's queue 'gpus'"
        assert submitted.scaling is not None
        assert (submitted.scaling.queue, submitted.scaling.resumes) == ("gpus", False)
        with pytest.raises(BackendError, match="in Kueue's queue 'gpus', which alone says when it is suspended"):
            await backend.resize("job", 0)
        resized = await backend.resize("job", 3)
        assert (resized.phase, resized.wanted) == ("pending", 3)
        (owner,) = await cluster.found("jobs")
        assert (owner["spec"]["suspend"], owner["spec"]["completions"]) == (True, 3)
    finally:
        await backend.delete("job")
