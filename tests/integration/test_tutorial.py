"""The log of the original's tutorial, with processes of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tutorial import MAX_LOAD, OTHER_LOAD, Monitored, Tutorial, all_at_their_most, spec, the_third_has_joined

from edl_runtime.autoscale.plan import Rules
from edl_runtime.backends.local import LocalBackend
from edl_runtime.store.client import connect


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_jobs_make_way_for_a_third(work_dir: Path, redis_url: str, namespace: str) -> None:
    """The first runs 10, the second joins with 8, and both shrink for the third; no shard is consumed in vain.

    Nothing else reserves something here, so what others took there is left free.
    """
    cpus = float(os.cpu_count() or 1)
    backend = LocalBackend(work_dir)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
    env = {**clean, "EDL_WORK_DIR": str(work_dir), "EDL_REDIS_URL": redis_url, "EDL_NAMESPACE": namespace}
    async with connect(redis_url) as client:
        tutorial = Tutorial(backend, client, namespace, redis_url, Rules(max_load=MAX_LOAD - OTHER_LOAD))
        try:
            with Monitored(env) as monitor:
                await tutorial.submit(spec("example", namespace, cpus))
                await tutorial.rescale_until(lambda running: running == {"example": 10})
                assert await monitor.shows(1, 0, "example:10") == pytest.approx(0.36, abs=0.001)
                await tutorial.submit(spec("example1", namespace, cpus))
                await tutorial.rescale_until(all_at_their_most)
                assert await monitor.shows(2, 0, r"example:10\|example1:8") == pytest.approx(0.68, abs=0.001)
                await tutorial.submit(spec("example2", namespace, cpus))
                await tutorial.rescale_until(the_third_has_joined)
                assert await monitor.shows(3, 0, r"example:[34]\|example1:[34]\|example2:4") <= MAX_LOAD - OTHER_LOAD
                before = await tutorial.consumed("example")
        finally:
            for job in await backend.list():
                await backend.delete(job.name)
        for name in ("example", "example1", "example2"):
            consumed, begun = await tutorial.consumed(name)
            assert consumed > 0
            assert begun == 0
        assert (await tutorial.consumed("example"))[0] >= before[0]
