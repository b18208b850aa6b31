"""`edl drain` with real teachers: in a pool of the local backend, and beside a server that is not ours."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.edl_command import Edl, edl_command
from support.paths import TESTS
from support.students.readers import Batches, reader_of
from support.teachers.process import PATIENCE_S, running_teacher, wait_until

from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.distill import Discovered
from edl_runtime.registry.directory import Directory
from edl_runtime.settings import RuntimeSettings, split_secrets
from edl_runtime.specs import Bounds, JobSpec
from edl_runtime.store.redis_client import connect

pytestmark = pytest.mark.slow

POOL = "doubles"


@pytest.fixture
def settings(settings: RuntimeSettings, work_dir: Path) -> RuntimeSettings:
    """Leases do not run out however busy the machine is."""
    return msgspec.structs.replace(settings, lease_ttl_s=600.0, work_dir=str(work_dir))


@pytest.fixture
def edl(
    settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Edl]:
    with edl_command(monkeypatch, capsys, "drain") as run:
        for name, value in settings.to_env().items():
            monkeypatch.setenv(name, value)
        yield run


def teachers(settings: RuntimeSettings) -> list[str]:
    async def read() -> list[str]:
        async with connect(settings.redis_url) as client:
            return [member.address for member in await Directory(client, settings.namespace).members(POOL)]

    return asyncio.run(read())


def test_a_drained_teacher_of_a_pool_is_replaced(settings: RuntimeSettings, work_dir: Path, edl: Edl) -> None:
    """It leaves at once and ends as it should, the pool keeps its size, and its student has every answer once."""
    backend = LocalBackend(work_dir)
    command = ("python", "-m", "edl_runtime.cli", "teacher", "--model", "support.models:slow", "--pool", POOL)
    env, secrets = split_secrets({**settings.to_env(), "PYTHONPATH": str(TESTS)})
    spec = JobSpec(name=POOL, kind="pool", command=command, bounds=Bounds(1, 3), instances=2, env=env)
    asyncio.run(backend.submit(spec, token="test", secrets=secrets))
    try:
        before = wait_until(lambda: found if len(found := teachers(settings)) == 2 else [])
        seen: list[Any] = []
        enough = threading.Event()

        def study() -> None:
            with reader_of(Batches(10**6, seconds=0.01), Discovered(POOL), settings) as reader:
                for item in reader:
                    seen.append(item)
                    if enough.is_set():
                        return

        student = threading.Thread(target=study)
        student.start()
        try:
            wait_until(lambda: len(seen) > 5)
            assert edl(POOL, before[0])[0] == 0
            assert before[0] not in teachers(settings)
            after = wait_until(lambda: found if len(found := teachers(settings)) == 2 else [])
            assert before[1] in after
            count = len(seen)
            wait_until(lambda: len(seen) > count + 5)
        finally:
            enough.set()
            student.join()
        Batches(len(seen)).check(seen)
        status = asyncio.run(backend.get(POOL))
        assert (status.phase, status.wanted, status.reason) == ("running", 2, "")
        assert sorted(instance.restarts for instance in status.instances) == [0, 1], "young as it was"
        assert not any(instance.given_up for instance in status.instances)
    finally:
        asyncio.run(backend.delete(POOL))
    assert "has no teacher 'h:1'" in edl(POOL, "h:1")[2]


def test_a_drained_server_stays_out_until_it_is_told_otherwise(
    settings: RuntimeSettings, tmp_path: Path, edl: Edl
) -> None:
    """Its `edl register` runs on and says how it comes back."""
    log = tmp_path / "log"
    with running_teacher("support.models:slow") as server, log.open("w") as errors:
        address = f"oip+http://{server.address}/teacher"
        command = [sys.executable, "-m", "edl_runtime.cli", "register", "--pool", POOL, "--drain-s", "0"]
        sidecar = subprocess.Popen(
            [*command, "--server", address], env=settings.to_env(), stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            wait_until(lambda: teachers(settings) == [address])
            assert edl(POOL, address)[0] == 0
            assert teachers(settings) == []
            wait_until(lambda: f"edl drain --undo {POOL} {address}" in log.read_text())
            assert teachers(settings) == []
            assert edl("--undo", POOL, address)[:2] == (0, f"{address} may join pool {POOL} again\n")
            wait_until(lambda: teachers(settings) == [address])
        finally:
            sidecar.terminate()
        assert sidecar.wait(PATIENCE_S) == 0
