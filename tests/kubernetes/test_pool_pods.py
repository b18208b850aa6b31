"""A pool of teachers in pods that is resized while a student reads."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.backends.jobs import eventually
from support.cluster.cluster import RedisService
from support.paths import TESTS
from support.students.readers import POOL, Batches, reader_of

from edl_airflow.operators.job_specs import pool_job_spec
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.distill import Discovered
from edl_runtime.pods import Pod, Volume
from edl_runtime.registry.directory import Directory
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, TeacherSpec
from edl_runtime.store.redis_client import connect

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.timeout(600)]

TOKEN = "a-token-of-these-tests"
WITHIN_S = 120.0


async def test_a_pool_grows_and_shrinks_while_a_student_reads(
    backend: KubernetesBackend, redis_service: RedisService, namespace: str
) -> None:
    """One teacher, four, two: each sample comes once, in order and with its own answer; removed teachers drain."""
    settings = RuntimeSettings(
        redis_url=redis_service.url, namespace=namespace, teacher_token=TOKEN, teacher_wait_s=WITHIN_S
    )
    pod = Pod(volumes=[Volume(path=str(TESTS), source={"hostPath": {"path": str(TESTS)}}, read_only=True)])
    teacher = TeacherSpec(model="support.models:slow", pod=pod)
    pool = pool_job_spec(POOL, teacher, Bounds(1, 4), namespace=namespace, folder=TESTS)
    secrets = {"EDL_REDIS_URL": redis_service.url_in_cluster, "EDL_TEACHER_TOKEN": TOKEN}
    await backend.submit(pool, token="mine", secrets=secrets)

    epochs: list[list[object]] = []
    enough = threading.Event()
    batches = Batches(200, seconds=0.01)

    def study() -> None:
        with reader_of(batches, Discovered(POOL), settings) as reader:
            while not enough.is_set():
                epochs.append(list(reader))

    async with connect(redis_service.url) as client:
        directory = Directory(client, namespace)

        async def teach(count: int) -> None:
            async def registered() -> bool:
                return len(await directory.members(POOL)) == count

            await eventually(registered, f"{count} teachers", WITHIN_S)

        studying = asyncio.create_task(asyncio.to_thread(study))
        try:
            await teach(1)
            await backend.resize(POOL, 4)
            await teach(4)
            seen = len(epochs)
            await eventually(lambda: _more(epochs, seen), "an epoch by four", WITHIN_S)
            await backend.resize(POOL, 2)
            await teach(2)
            seen = len(epochs)
            await eventually(lambda: _more(epochs, seen), "an epoch by two", WITHIN_S)
        finally:
            enough.set()
            await studying
    for epoch in epochs:
        batches.check(epoch)
    status = await backend.get(POOL)
    assert (status.phase, status.reason) == ("running", "")


async def _more(epochs: list[list[object]], seen: int) -> bool:
    return len(epochs) > seen + 1
