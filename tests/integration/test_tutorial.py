"""The log of the original's tutorial, with processes of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.autoscale.tutorial import MAX_LOAD, OTHER_LOAD, Tutorial

from edl_runtime.autoscale.planner import RescalingRules
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.store.redis_client import connect


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_two_jobs_shrink_to_make_room_for_a_third(work_dir: Path, redis_url: str, namespace: str) -> None:
    """The first has 10 trainers, the second 8; both shrink for the third, and no shard is unfinished.

    There is no other load here, so as much is left free.
    """
    cpus = float(os.cpu_count() or 1)
    backend = LocalBackend(work_dir)
    async with connect(redis_url) as client:
        tutorial = Tutorial(backend, client, namespace, redis_url, RescalingRules(max_load=MAX_LOAD - OTHER_LOAD))
        await tutorial.play(cpus, 0.0)
