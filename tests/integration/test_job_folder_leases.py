"""The folders that an agent's job leases in a real Redis, and the notes for its owner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from edl_runtime.checkpoint import folder_lease
from edl_runtime.checkpoint.folder_lease import JobFolderLeases
from edl_runtime.checkpoint.storage import storage_at
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError
from edl_runtime.store.redis_client import connect

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from edl_runtime.store.redis_server import RedisServer

LIMIT_S = 60.0


@asynccontextmanager
async def holding(
    client: Redis, url: Path, notify: Callable[[str], None]
) -> AsyncIterator[tuple[JobFolderLeases, asyncio.Event]]:
    """Lease a folder as a job's agent does. The event is set at each change."""
    changed = asyncio.Event()
    mine = JobFolderLeases(
        client, RuntimeSettings(job="nightly", lease_ttl_s=LIMIT_S), notify=notify, changed=changed.set
    )
    mine.add(str(url))
    async with asyncio.timeout(LIMIT_S):
        running = asyncio.create_task(mine.run())
        try:
            yield mine, changed
        finally:
            running.cancel()
            await asyncio.wait([running])


async def test_a_job_whose_redis_user_may_not_use_the_keys_waits_and_notifies(
    own_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with the keys and Redis's answer: nothing else of the job needs them."""
    for name in ("REPORT_WAIT_AFTER_S", "REDIS_RETRY_S"):
        monkeypatch.setattr(folder_lease, name, 0.02)
    notes: asyncio.Queue[str] = asyncio.Queue()
    async with connect(own_redis.url) as admin:
        allowed = ["on", ">word", "+@all", "&*", "~edl:{default*"]
        await admin.execute_command("ACL", "SETUSER", "team", *allowed)
        url = f"redis://team:word@127.0.0.1:{own_redis.port}/0"
        async with connect(url) as client, holding(client, tmp_path, notes.put_nowait) as (mine, changed):
            note = await notes.get()
            assert "edl:{checkpoint-folder/" in note
            assert "permission" in note
            assert not mine.are_held
            await asyncio.sleep(0.1)  # several more tries
            assert notes.empty()
            await admin.execute_command("ACL", "SETUSER", "team", "~edl:{checkpoint-folder/*")
            await changed.wait()
            assert mine.are_held


async def test_a_place_of_which_redis_has_something_else_is_refused(client: Redis, tmp_path: Path) -> None:
    """The job fails with the key."""
    leases, holder, _ = keys.checkpoint_lease(storage_at(str(tmp_path)).identity())
    await client.set(holder, "what is this?")
    async with holding(client, tmp_path, lambda _: None) as (mine, changed):
        await changed.wait()
        (error,) = mine.take_conflicts()
        assert isinstance(error, MalformedRecordError)
        assert "checkpoint-folder/" in str(error)
        assert "delete the key" in str(error)
    await client.delete(leases, holder)
