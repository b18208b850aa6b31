"""Leases of a checkpoint folder in a real Redis: shared by a job's processes, refused to another job."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from structlog.testing import capture_logs
from support.registry.followers import wait_for_log

from edl_runtime.checkpoint import folder_lease
from edl_runtime.checkpoint.errors import CheckpointHeldError, CheckpointStoreError, FolderHolder
from edl_runtime.checkpoint.folder_lease import FILE, FolderLease, Lost, hold_until_exit
from edl_runtime.checkpoint.storage import storage_at
from edl_runtime.errors import EdlError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError, RegistryUnavailableError
from edl_runtime.store.redis_client import connect, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from edl_runtime.store.redis_server import RedisServer

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for a renewal, and no lease expires on a busy machine."""
    for name in ("RENEW_EVERY_S", "RETRY_EVERY_S", "POLL_EVERY_S", "FIND_EVERY_S"):
        monkeypatch.setattr(folder_lease, name, 0.02)


def job(name: str, namespace: str, **given: object) -> RuntimeSettings:
    settings = RuntimeSettings(namespace=namespace, job=name, redis_url="redis://127.0.0.1:1/0", lease_ttl_s=LIMIT_S)
    return msgspec.structs.replace(settings, **given)


def fail_if_lost(error: EdlError) -> None:
    raise AssertionError(error)


@asynccontextmanager
async def held(
    client: Redis, settings: RuntimeSettings, url: Path | str, lost: Lost = fail_if_lost
) -> AsyncIterator[None]:
    """Hold a folder in a task, as an agent does."""
    lease = FolderLease(client, settings, str(url))
    async with asyncio.timeout(LIMIT_S):
        await lease.take()
    keeping = asyncio.create_task(lease.keep(lost))
    await asyncio.sleep(0)  # it has begun
    try:
        yield
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping


async def refusal(client: Redis, settings: RuntimeSettings, url: Path | str) -> CheckpointHeldError:
    with pytest.raises(CheckpointHeldError) as refused:
        async with held(client, settings, url):
            pass
    return refused.value


async def test_another_job_is_refused_by_an_error_that_names_the_holder(
    client: Redis, namespace: str, tmp_path: Path
) -> None:
    """Also one of another namespace: the folder is the same. The error says what to do."""
    async with held(client, job("nightly", namespace, checkpoint_stream="dag/train"), tmp_path):
        error = await refusal(client, job("other", f"{namespace}-2"), tmp_path)
    text = str(error)
    assert text.startswith(
        f"job 'nightly' (of the Airflow task 'dag/train', in namespace '{namespace}') has used the checkpoint folder "
    )
    assert str(tmp_path) in text
    assert re.search(r"since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d", text)
    assert "EDL_CHECKPOINT" in text
    assert "`edl stop nightly`" in text


async def test_the_processes_of_a_job_share_a_folder(client: Redis, namespace: str, tmp_path: Path) -> None:
    """It is free when the last of them has released it, and not before."""
    mine = job("nightly", namespace)
    async with held(client, mine, tmp_path):
        async with held(client, msgspec.structs.replace(mine, instance=1), tmp_path):
            pass
        await refusal(client, job("other", namespace), tmp_path)
    async with held(client, job("other", namespace), tmp_path):
        await refusal(client, mine, tmp_path)


async def test_the_processes_of_a_job_share_a_folder_by_any_address_of_their_redis(
    client: Redis, own_redis: RedisServer, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that starts just after Redis has lost all. A job of the same name on another Redis is another job."""
    mine = job("nightly", namespace)
    other = msgspec.structs.replace(mine, instance=1, redis_url="redis://proxy.example:7000/1")
    async with held(client, mine, tmp_path):
        async with held(client, other, tmp_path):
            pass
        await client.delete(*keys.checkpoint_lease(storage_at(str(tmp_path)).identity()))
        async with held(client, other, tmp_path):
            pass
        monkeypatch.setattr(folder_lease, "TOKEN_BACK_IN_S", 0.1)
        async with connect(own_redis.url) as elsewhere:
            assert (await refusal(elsewhere, mine, tmp_path)).holder.job == "nightly"
            leases, *_ = keys.checkpoint_lease(storage_at(str(tmp_path)).identity())
            assert not await elsewhere.exists(leases)
    async with connect(own_redis.url) as elsewhere, held(elsewhere, mine, tmp_path):
        pass


async def test_the_folder_of_a_dead_job_is_free_when_its_lease_has_expired(
    client: Redis, namespace: str, tmp_path: Path
) -> None:
    """Another job waits for that, logs for whom, and is not refused. All keys expire."""
    dead = job("dead", namespace, checkpoint_stream="dag/train")
    lease = FolderLease(client, dead, str(tmp_path))
    await lease.take()

    async def expires() -> None:
        await wait_for_log(logs, "checkpoint.folder_awaited")
        leases, *_ = keys.checkpoint_lease(storage_at(str(tmp_path)).identity())
        await client.zadd(leases, {lease._member: 1})

    with capture_logs() as logs:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(expires())
            async with held(client, job("other", namespace), tmp_path):
                pass
    for key in keys.checkpoint_lease(storage_at(str(tmp_path)).identity()):
        assert await client.ttl(key) != -1
    (entry,) = logs
    assert 0 < entry.pop("at_most_s") <= LIMIT_S
    whose = {"job": "dead", "namespace": namespace, "task": "dag/train"}
    assert entry == {"event": "checkpoint.folder_awaited", "log_level": "info", "url": str(tmp_path), **whose}


async def test_a_folder_whose_lease_redis_has_lost_is_leased_again(
    client: Redis, namespace: str, tmp_path: Path
) -> None:
    """If another job took it meanwhile, the first reports that once, continues, and gets it back at the other's end."""
    lost: list[EdlError] = []
    leases, holder, _ = every = keys.checkpoint_lease(storage_at(str(tmp_path)).identity())

    async def comes_back() -> None:
        await client.delete(*every)
        while not await client.exists(leases):  # noqa: ASYNC110 - there is nothing to await
            await asyncio.sleep(0.01)
        assert await client.hget(holder, "job") == f"{namespace}/nightly"

    async with asyncio.timeout(LIMIT_S), held(client, job("nightly", namespace), tmp_path, lost.append):
        await comes_back()
        assert not lost
        thief = FolderHolder(namespace=namespace, job="thief", since=0.0)
        await client.hset(holder, mapping={"job": f"{namespace}/thief", "about": msgspec.json.encode(thief)})
        while not lost:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # several more looks
        await comes_back()
    assert [error.holder.job for error in lost if isinstance(error, CheckpointHeldError)] == ["thief"]
    assert len(lost) == 1


async def test_a_folder_stays_leased_while_redis_is_down(
    own_redis: RedisServer, namespace: str, tmp_path: Path
) -> None:
    """The job continues; when Redis is back, empty, the job leases the folder again."""
    mine = job("nightly", namespace)
    async with connect(own_redis.url) as client, asyncio.timeout(LIMIT_S), held(client, mine, tmp_path):
        await asyncio.to_thread(own_redis.stop)
        await asyncio.sleep(0.1)  # several looks
        await asyncio.to_thread(own_redis.start)
        leases, *_ = keys.checkpoint_lease(storage_at(str(tmp_path)).identity())
        while not await _exists(client, leases):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await refusal(client, job("other", namespace), tmp_path)


async def _exists(client: Redis, key: str) -> bool:
    with suppress(RegistryUnavailableError), unavailable_if_lost(client):
        return bool(await client.exists(key))
    return False


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """The exit handlers of this process, which run at the test's end."""
    handlers: list[Callable[[], None]] = []
    monkeypatch.setattr("edl_runtime.checkpoint.folder_lease.atexit.register", handlers.append)
    yield handlers
    for handler in handlers:
        handler()
    assert "checkpoint folder" not in [thread.name for thread in threading.enumerate()]


async def test_a_script_without_an_agent_holds_its_place_until_it_exits(
    client: Redis, namespace: str, tmp_path: Path, redis_url: str, at_exit: list[Callable[[], None]]
) -> None:
    """As a plain student that calls `elastic.init`: the second is refused, and the folder is free at the end."""
    mine = job("student", namespace, redis_url=redis_url)
    await asyncio.to_thread(hold_until_exit, mine, str(tmp_path))
    with pytest.raises(CheckpointHeldError, match="'student'"):
        await asyncio.to_thread(hold_until_exit, job("other", namespace, redis_url=redis_url), str(tmp_path))
    await asyncio.to_thread(at_exit.pop())
    assert not at_exit
    async with held(client, job("other", namespace), tmp_path):
        pass


async def test_a_script_that_a_person_has_started_holds_a_folder_until_it_exits(
    client: Redis, namespace: str, tmp_path: Path, redis_url: str, at_exit: list[Callable[[], None]]
) -> None:
    """Without Redis or a job's name, it refuses all others, and all others refuse it."""
    mine = job("student", namespace, redis_url=redis_url)
    for by_hand in (RuntimeSettings(job="by-hand"), RuntimeSettings(redis_url="redis://127.0.0.1:1/0")):
        hold_until_exit(by_hand, str(tmp_path))
        assert "started by hand" in str(await refusal(client, mine, tmp_path))
        at_exit.pop()()
        async with held(client, mine, tmp_path):
            with pytest.raises(CheckpointHeldError, match="'student'"):
                hold_until_exit(by_hand, str(tmp_path))
    assert not at_exit


def test_a_script_that_can_not_reach_its_redis_continues(tmp_path: Path, at_exit: list[Callable[[], None]]) -> None:
    """With a warning. The folder is locked against other scripts."""
    with capture_logs() as logs:
        hold_until_exit(RuntimeSettings(job="student", redis_url="redis://127.0.0.1:1/0"), str(tmp_path))
    with pytest.raises(CheckpointHeldError, match="'student'"):
        hold_until_exit(RuntimeSettings(), str(tmp_path))
    assert [(log["event"], log["log_level"]) for log in logs] == [("checkpoint.folder_not_held", "warning")]
    assert len(at_exit) == 1


@pytest.mark.parametrize("swap", ["moved", "removed", "replaced by a copy"])
async def test_a_folder_that_replaces_a_leased_one_is_leased(
    client: Redis, namespace: str, tmp_path: Path, redis_url: str, swap: str
) -> None:
    """Other jobs and processes are refused there, too; the log says that the folder has changed."""
    kept = tmp_path / "kept"
    if swap == "replaced by a copy":  # at once, by a link: the job makes a folder where it finds none
        (tmp_path / "first").mkdir()
        kept.symlink_to(tmp_path / "first")
    with capture_logs() as logs:
        async with asyncio.timeout(LIMIT_S), held(client, job("nightly", namespace, redis_url=redis_url), kept):
            before = storage_at(str(kept)).identity()
            match swap:
                case "moved":
                    kept.rename(tmp_path / "moved")
                case "removed":
                    shutil.rmtree(kept)
                case _:
                    shutil.copytree(kept, tmp_path / "copy")
                    (tmp_path / "link").symlink_to(tmp_path / "copy")
                    (tmp_path / "link").rename(kept)
            while not kept.exists() or not (kept / FILE).exists():  # noqa: ASYNC110 - there is nothing to await
                await asyncio.sleep(0.01)
            leases, *_ = keys.checkpoint_lease(identity := storage_at(str(kept)).identity())
            while not await client.exists(leases):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert identity != before
            assert (await refusal(client, job("other", namespace, redis_url=redis_url), kept)).holder.job == "nightly"
            with pytest.raises(CheckpointHeldError, match="'nightly'"):
                hold_until_exit(RuntimeSettings(), str(kept))
        assert [log["event"] for log in logs] == ["checkpoint.folder_changed", "checkpoint.folder_awaited"]


async def test_keys_of_another_type_are_reported_and_the_job_continues(
    client: Redis, namespace: str, tmp_path: Path
) -> None:
    """Once, until they are gone and the folder is leased again; another process gets the same error."""
    lost: list[EdlError] = []
    leases, holder, locks = keys.checkpoint_lease(storage_at(str(tmp_path)).identity())
    async with asyncio.timeout(LIMIT_S), held(client, job("nightly", namespace), tmp_path, lost.append):
        for key in (leases, holder, locks):
            await client.set(key, "what is this?")
            while not lost:  # noqa: ASYNC110 - there is nothing to await
                await asyncio.sleep(0.01)
            with pytest.raises(MalformedRecordError, match="checkpoint-folder/"):
                await FolderLease(client, job("nightly", namespace), str(tmp_path)).take()
            await asyncio.sleep(0.1)  # several more looks
            assert [type(error) for error in lost] == [MalformedRecordError]
            await client.delete(leases, holder, locks)
            while not await client.exists(leases):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            lost.clear()
        await client.set(leases, "what is this?")  # the end meets this, too


async def test_a_folder_that_can_not_be_used_is_an_error(client: Redis, namespace: str, tmp_path: Path) -> None:
    """Such as a file."""
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointStoreError, match="file"):
        await FolderLease(client, job("nightly", namespace), str(tmp_path / "file")).take()


async def test_a_holder_of_another_version_still_holds_the_folder(
    client: Redis, namespace: str, tmp_path: Path
) -> None:
    """Its name is unknown, but its folder is not taken."""
    async with held(client, job("first", namespace), tmp_path):
        lease_keys = keys.checkpoint_lease(storage_at(str(tmp_path)).identity())
        await client.hset(lease_keys[1], "about", '{"owner": "first"}')
        with pytest.raises(CheckpointHeldError, match="one of another version"):
            await FolderLease(client, job("second", namespace), str(tmp_path)).take()
