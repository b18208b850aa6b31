"""Which pools a gateway follows, and what it keeps of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from support.llm.processes import fake_teacher
from support.network.certificates import Authority
from support.network.ports import free_ports

from edl_runtime.gateway.errors import FollowedPoolsError, RequestTooLargeError, TeacherFailedError
from edl_runtime.gateway.gateway import Gateway
from edl_runtime.gateway.http import TeacherClient
from edl_runtime.gateway.pool import FollowedPool
from edl_runtime.gateway.requests import ALL_KINDS, Chat
from edl_runtime.gateway.room import Room
from edl_runtime.gateway.teachers import LlmTeacher, TestScores
from edl_runtime.protocol.llm import LlmServer, llm_signature
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.keys import Service
from edl_runtime.store.redis_client import connect

SERVER = LlmServer(kind="vllm")
MEMBER = Member(id="1", address="vllm+http://127.0.0.1:1/fake", signature=llm_signature("fake", SERVER, ()))


@pytest.fixture
async def redis(settings: RuntimeSettings) -> AsyncIterator[Redis]:
    async with connect(settings.redis_url) as client:
        yield client


def teacher(address: str = "vllm+http://127.0.0.1:1/fake") -> LlmTeacher:
    """Return a teacher that was not tested yet."""
    return LlmTeacher(Member(id="1", address=address, signature=llm_signature("fake", SERVER, ())), SERVER)


async def test_a_teacher_doubted_as_it_is_handed_out_still_tells_its_model(settings: RuntimeSettings) -> None:
    """The request that waited for it goes on, and waits for a teacher where it needs one."""
    async with TeacherClient(settings) as http:
        pool = FollowedPool("p", Redis(), http, settings, wait_s=60.0)
        one = pool.queue.teachers["a"] = teacher()
        asked = asyncio.create_task(pool.model(ALL_KINDS))
        await asyncio.sleep(0)
        one.tested = True
        pool.queue.changed()  # hands it out
        one.doubt()
        assert (await asked).id == "fake"


async def test_a_pool_that_ends_by_itself_ends_its_tests(settings: RuntimeSettings) -> None:
    """A gateway replaces it at the next request, and nobody stops it."""
    unreachable = msgspec.structs.replace(settings, redis_url=f"redis://127.0.0.1:{free_ports(1)[0]}")
    async with connect(unreachable.redis_url) as client, TeacherClient(settings) as http:
        pool = FollowedPool("p", client, http, unreachable, wait_s=0.0)
        test = pool._tests[teacher()] = asyncio.create_task(asyncio.sleep(600))
        pool.start()
        with pytest.raises(RegistryUnavailableError):
            await pool.model(ALL_KINDS)
        await asyncio.wait([test])
        assert test.cancelled()


async def test_a_test_that_fails_as_nobody_expects_is_made_again(
    settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And until then the teacher is in quarantine, with the reason."""
    reasons: list[str] = []
    async with TeacherClient(settings) as http:
        pool = FollowedPool("p", Redis(), http, settings, wait_s=60.0)
        one = pool.queue.teachers["a"] = teacher()

        async def test(_: LlmTeacher) -> TestScores:
            reasons.append(one.health.reason)
            if len(reasons) < 3:
                raise RecursionError("too deep")
            return []

        monkeypatch.setattr(pool, "_test", test)
        testing = asyncio.create_task(pool._keep_tested(one))
        await pool.wait_for_teacher()
        testing.cancel()
    assert reasons == ["", *["its self-test can't be made: RecursionError: too deep"] * 2]


async def test_a_teacher_without_tls_gets_no_token_where_authorities_are_set(
    settings: RuntimeSettings, tmp_path: Path
) -> None:
    """It is refused with the reason, which puts it into quarantine, before anything is sent."""
    authority = Authority(tmp_path / "ours")
    strict = msgspec.structs.replace(settings, teacher_ca=str(authority.ca), teacher_token="s3cret")
    with fake_teacher() as fake:
        async with TeacherClient(strict) as http:
            with pytest.raises(TeacherFailedError, match="EDL_TEACHER_CA is set"):
                await http.get(teacher(fake.address), "/v1/models")
        assert not fake.asked("requests")


async def test_an_invented_pool_leaves_redis_soon_after_its_last_request(
    settings: RuntimeSettings, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one is followed for longer, as its teachers' tests cost them time."""
    monkeypatch.setattr("edl_runtime.gateway.gateway.EMPTY_IDLE_S", 0.0)
    monkeypatch.setattr("edl_runtime.gateway.gateway.SWEEP_EVERY_S", 0.01)
    service, directory = Service(settings.namespace, "real"), Directory(redis, settings.namespace)
    async with TeacherClient(settings) as http, hold_lease(redis, service, MEMBER, ttl_s=60.0):
        gateway = Gateway(redis, http, settings, wait_s=0.0)
        for name in ("invented", "real"):
            async with gateway.pool(name) as pool:
                await pool.is_healthy()
        assert "invented" in await directory.pools()
        sweeping = asyncio.create_task(gateway.run())
        async with asyncio.timeout(60):  # hangs otherwise
            while "invented" in await directory.pools():  # noqa: ASYNC110 - Redis has no event of it
                await asyncio.sleep(0.01)
        assert gateway.pools.keys() == {"real"}
        left = [key async for key in redis.scan_iter(f"*{settings.namespace}*invented*")]
        assert all([await redis.ttl(key) > 0 for key in left]), "counters of a name go a day later"
        sweeping.cancel()
        await asyncio.wait([sweeping])


async def test_an_answer_is_held_as_it_comes(settings: RuntimeSettings, redis: Redis) -> None:
    """By what parsing takes; a request whose answer is beyond its share fails without the rest of it being read."""
    with fake_teacher() as fake:
        member = msgspec.structs.replace(MEMBER, address=fake.address)
        service = Service(settings.namespace, "p")
        async with TeacherClient(settings) as http, hold_lease(redis, service, member, ttl_s=60.0):
            pool = FollowedPool("p", redis, http, settings, wait_s=60.0)
            pool.start()
            chat = Chat(b'{"messages": [{"role": "user", "content": "hello"}]}')
            with Room(1 << 20, 1 << 20).opened("p", "me", 0.0) as holding:
                answer = await pool.answer(chat, holding)
                assert holding.size == len(answer) * chat.answer_takes
            with Room(len(answer), len(answer)).opened("p", "me", 0.0) as holding, pytest.raises(RequestTooLargeError):
                await pool.answer(chat, holding)
            await pool.stop()


async def test_invented_pools_leave_half_of_the_places_to_real_ones(
    settings: RuntimeSettings, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once half of the places are taken, only a pool with teachers is followed."""
    monkeypatch.setattr("edl_runtime.gateway.gateway.POOL_LIMIT", 4)
    service = Service(settings.namespace, "real")
    async with TeacherClient(settings) as http, hold_lease(redis, service, MEMBER, ttl_s=60.0):
        gateway = Gateway(redis, http, settings, wait_s=0.0)
        for name in ("one", "two"):
            async with gateway.pool(name):
                pass
        with pytest.raises(FollowedPoolsError, match="'three' has no teachers"):
            await gateway.pool("three").__aenter__()
        async with gateway.pool("real") as followed:
            assert followed.name == "real"
        for pool in gateway.pools.values():
            await pool.stop()
