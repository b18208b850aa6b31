"""A Redis that deletes keys when it is full, and who warns of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.edl_command import edl_command
from support.paths import EXAMPLES

from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.cli.run import _run
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, JobSpec
from edl_runtime.store import redis_client
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer


async def full(server: RedisServer, policy: str, limit: str = "100mb") -> None:
    """Have this Redis do so when it is full."""
    async with connect(server.url) as client:
        await client.config_set("maxmemory", limit)
        await client.config_set("maxmemory-policy", policy)


@pytest.mark.parametrize(
    ("policy", "limit", "evicts"),
    [
        ("noeviction", "100mb", False),
        ("volatile-lru", "0", False),
        ("volatile-lru", "100mb", True),
        ("allkeys-random", "100mb", True),
    ],
)
async def test_a_redis_that_evicts_is_told_from_one_that_keeps_all(
    own_redis: RedisServer, policy: str, limit: str, *, evicts: bool
) -> None:
    """By its policy, also where CONFIG is forbidden; without a limit none applies."""
    await full(own_redis, policy, limit)
    async with connect(own_redis.url) as client:
        await client.acl_setuser("default", commands=["+@all", "-config"])
        warning = await redis_client.eviction_warning(client)
    assert (f"maxmemory-policy {policy}" in warning, "to noeviction" in warning) == (evicts, evicts)


def test_edl_submit_warns_of_a_redis_that_evicts(
    own_redis: RedisServer, work_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it starts anything."""
    asyncio.run(full(own_redis, "volatile-lru"))
    with edl_command(monkeypatch, capsys) as edl:
        monkeypatch.setenv("EDL_REDIS_URL", own_redis.url)
        monkeypatch.setenv("EDL_WORK_DIR", str(work_dir))
        monkeypatch.setattr(LocalBackend, "submit", _nothing_starts)
        _, _, complaint = edl("submit", "-f", EXAMPLES / "training_job" / "examplejob.yaml")
    assert "edl: warning: this Redis deletes keys when it is full (maxmemory-policy volatile-lru)" in complaint


async def test_edl_run_warns_of_a_redis_that_evicts(
    own_redis: RedisServer, work_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it starts anything. One that is away holds nothing up, for the agents wait for it."""
    monkeypatch.setattr(LocalBackend, "submit", _nothing_starts)
    spec = JobSpec(name="job", kind="trainer", command=("true",), bounds=Bounds(1, 1), instances=1)
    settings = RuntimeSettings(work_dir=str(work_dir), redis_url=own_redis.url)
    await full(own_redis, "volatile-lru")
    with pytest.raises(SpecError, match="none here"):
        await _run(spec, settings, detach=True, as_json=False)
    assert "(maxmemory-policy volatile-lru)" in capsys.readouterr().err
    own_redis.kill()
    with pytest.raises(SpecError, match="none here"):
        await _run(spec, settings, detach=True, as_json=False)
    assert capsys.readouterr().err == ""


async def _nothing_starts(*_: object, **__: object) -> None:
    raise SpecError("job", "", "none here")
