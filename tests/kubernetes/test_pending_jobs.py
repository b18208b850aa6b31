"""What whoever rescales hears of pods, by watches alone."""

from __future__ import annotations

import pytest
from support.backends.jobs import WAITS, eventually, job, says
from support.cluster.cluster import Cluster
from support.cluster.pod_faults import evict, leaving_nothing, pods_of, quota

from edl_runtime.autoscale.news import Look, look_at, news
from edl_runtime.backends.base import Backend

pytestmark = [pytest.mark.kubernetes, pytest.mark.deep, pytest.mark.timeout(600)]


async def test_a_job_that_loses_its_room_is_pending_until_it_has_it_again(cluster: Cluster) -> None:
    """Its pod was evicted, and a quota keeps another from taking its place for a while."""
    async with leaving_nothing(cluster.backend(), cluster) as backend, cluster.backend().following() as followed:
        await backend.submit(job(WAITS, name="evicted", instances=1), token="mine", secrets={})
        await says(backend, "up", name="evicted", instances=1)
        runs = look_at(await followed.list())
        assert [(one.job, one.what) for one in news({}, runs)] == [("evicted", "submitted")]
        (pod,) = await pods_of(cluster, "evicted")
        async with quota(cluster, {"count/pods": "0"}):
            assert await evict(cluster, pod)
            await _hears(followed, runs, [("evicted", "pending")])
            pends = look_at(await followed.list())
        await _hears(followed, runs, [])
        assert news(pends, look_at(await followed.list())) == []


async def _hears(backend: Backend, before: Look, expected: list[tuple[str, str]]) -> None:
    async def is_so() -> bool:
        return [(one.job, one.what) for one in news(before, look_at(await backend.list()))] == expected

    await eventually(is_so, f"news: {expected}")
