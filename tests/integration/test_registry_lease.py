"""A lease against a real Redis: joined, renewed, left, refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from support.depth import examples

from edl_runtime.errors import PoolMismatchError, RegistryUnavailableError, SupersededError
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.registry import lease as lease_module
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.lease import Lease, hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.store import keys
from edl_runtime.store.client import address_of, connect, run_script
from edl_runtime.store.keys import Service

if TYPE_CHECKING:
    from redis.asyncio import Redis

DIGITS = ModelSignature(name="digits", inputs=(TensorSpec("image", "FP32", (-1, 784)),))
LETTERS = ModelSignature(name="letters", inputs=(TensorSpec("image", "FP32", (-1, 784)),))


@pytest.fixture(autouse=True)
def _renewed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for a renewal, and no lease is so short that it runs out where nobody has CPU."""
    monkeypatch.setattr(lease_module, "RENEW_EVERY_S", 0.02)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    async with connect(redis_url) as client:
        yield client


@pytest.fixture
def service(namespace: str) -> Service:
    return Service(namespace, "pool")


@pytest.fixture
def directory(client: Redis, namespace: str) -> Directory:
    return Directory(client, namespace)


def teacher(name: str = "a", model: ModelSignature | None = DIGITS) -> Member:
    return Member(id=name, address=f"{name}:1", signature=model)


def hold(client: Redis, service: Service, member: Member) -> AbstractAsyncContextManager[Lease]:
    return hold_lease(client, service, member, ttl_s=60)


async def until_anew(lease: Lease, before: int) -> None:
    async with asyncio.timeout(30):
        while lease.fence == before:  # noqa: ASYNC110 - a lease tells nobody
            await asyncio.sleep(0.01)


async def ids(directory: Directory) -> list[str]:
    return [member.id for member in await directory.members("pool")]


async def test_a_member_is_listed_from_the_first_line_of_the_block_to_its_end(
    client: Redis, service: Service, directory: Directory
) -> None:
    """Registered means listed, with all its data; left means gone at once, and the pool with it."""
    async with hold(client, service, teacher()) as lease:
        [listed] = await directory.members("pool")
        assert listed == Member(id="a", address="a:1", signature=DIGITS, fence=lease.fence)
        assert await directory.pools() == ["pool"]
        assert await directory.contract("pool") == DIGITS
    assert await directory.members("pool") == []
    assert await directory.contract("pool") is None
    assert await directory.pools() == []


async def test_a_pool_that_is_joined_while_it_is_struck_off_stays_listed(
    client: Redis, service: Service, directory: Directory
) -> None:
    """A reader that found a pool empty, and then somebody joins, does not hide it."""
    async with hold(client, service, teacher()):
        assert await directory._forget("pool") is False
        assert await directory.pools() == ["pool"]


async def test_a_lease_is_renewed_until_it_ran_out_and_then_taken_anew_with_a_larger_fence(
    client: Redis, service: Service, directory: Directory
) -> None:
    """Renewing puts its end off; a holder that was stopped for too long is a new member, and its old token is void."""
    scripted = keys.of_service(service)
    async with hold(client, service, teacher()) as lease, asyncio.timeout(30):
        before, ends_at = lease.fence, await client.zscore(keys.leases(service), "a")
        while await client.zscore(keys.leases(service), "a") == ends_at:  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.01)
        assert lease.fence == before
        await run_script(client, "release", scripted, ["a", before])
        await until_anew(lease, before)
        assert lease.fence > before
        assert await run_script(client, "release", scripted, ["a", before]) == 0
        assert await run_script(client, "renew", scripted, ["a", before, 1000, "", ""]) == "taken"
        assert await ids(directory) == ["a"]


async def test_a_holder_that_missed_the_answer_to_its_registration_is_not_superseded(
    client: Redis, service: Service, directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A starved process gives an answer up that Redis has given: it goes on with the registration that it finds."""
    missed = asyncio.Event()

    async def without_an_answer(client: Redis, name: str, *words: Any) -> Any:
        answer = await run_script(client, name, *words)
        if name == "register" and not missed.is_set():
            missed.set()
            raise RegistryUnavailableError("here", "it is silent")
        return answer

    async with hold(client, service, teacher()) as lease:
        before = lease.fence
        monkeypatch.setattr(lease_module, "run_script", without_an_answer)
        await client.delete(*keys.of_service(service))
        await until_anew(lease, before)
        assert missed.is_set()
        [listed] = await directory.members("pool")
        assert listed.fence == lease.fence > before


async def test_what_expires_goes_a_day_after_the_members_and_no_earlier(client: Redis, service: Service) -> None:
    """The counter and the news stay as long as members do, for renewing puts their end off."""
    kept = [keys.events(service), keys.fence(service)]
    async with hold(client, service, teacher()) as lease, asyncio.timeout(30):
        fence = lease.fence
        for key in kept:
            await client.expire(key, 60)
        while min([await client.ttl(key) for key in kept]) <= 60:  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.01)
        assert lease.fence == fence
    assert sorted(await client.keys(f"*{{{service.namespace}/{service.pool}}}*")) == sorted(kept)
    assert all([86_000 < await client.ttl(key) <= 86_400 for key in kept])


async def test_without_what_expires_tokens_still_grow_and_watchers_see_all(
    client: Redis, service: Service, directory: Directory
) -> None:
    """A counter that is gone begins at Redis's clock, above all it gave before; news are told anew."""
    async with (
        hold(client, service, teacher()) as lease,
        contextlib.aclosing(directory.watch("pool")) as changes,
        asyncio.timeout(30),
    ):
        assert [member.id for member in await anext(changes)] == ["a"]
        await client.delete(keys.events(service), keys.fence(service))
        await asyncio.sleep(0.01)  # Redis's clock counts in ms
        async with hold(client, service, teacher("b")) as second:
            assert second.fence > lease.fence
            assert [member.id for member in await anext(changes)] == ["a", "b"]
        assert [member.id for member in await anext(changes)] == ["a"]


async def test_a_later_registration_of_an_id_supersedes_the_earlier(
    client: Redis, service: Service, directory: Directory
) -> None:
    """The earlier holder is told, does not fight back, and does not take the later one down by leaving."""
    async with (
        hold(client, service, teacher()) as earlier,
        hold(client, service, teacher()) as later,
    ):
        assert later.fence > earlier.fence
        assert isinstance(await asyncio.wait_for(earlier.refused(), 30), SupersededError)
        assert [member.fence for member in await directory.members("pool")] == [later.fence]


@pytest.fixture
def _dead_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is refused is told that the pool's leases end in a moment; their holders renew them by then."""

    async def soon(client: Redis, name: str, *words: Any) -> Any:
        answer = await run_script(client, name, *words)
        return [*answer[:2], 1] if name == "register" and not answer[0] else answer

    monkeypatch.setattr(lease_module, "run_script", soon)


@pytest.mark.usefixtures("_dead_soon")
async def test_a_teacher_of_another_model_is_refused(client: Redis, service: Service, directory: Directory) -> None:
    """The error names the pool and what differs; the pool keeps its model until its last teacher has left."""
    async with hold(client, service, teacher()):
        async with hold(client, service, teacher("b")):
            pass
        with pytest.raises(PoolMismatchError, match="name is letters and the pool's digits") as caught:
            async with hold(client, service, teacher("b", LETTERS)):
                pytest.fail("it was let in")
        assert caught.value.pool == "pool"
        assert await ids(directory) == ["a"]
        assert await directory.contract("pool") == DIGITS
    assert await directory.contract("pool") is None


@pytest.mark.usefixtures("_dead_soon")
async def test_a_pool_taken_over_by_another_model_refuses_those_who_come_back(
    client: Redis, service: Service, directory: Directory
) -> None:
    """A teacher whose pool has become another's learns that it can never come back."""
    record, contract = '{"id":"b","address":"b:1"}', msgspec.json.encode(LETTERS).decode()
    async with hold(client, service, teacher()) as lease:
        async with client.pipeline(transaction=True) as at_once:
            at_once.delete(*keys.of_service(service))
            at_once.zadd(keys.leases(service), {"b": 9e12})
            at_once.hset(keys.records(service), "b", record)
            at_once.set(keys.contract(service), contract)
            await at_once.execute()
        assert isinstance(await asyncio.wait_for(lease.refused(), 30), PoolMismatchError)
        assert await ids(directory) == ["b"]


async def test_a_pool_can_start_again_with_another_model_while_dead_teachers_run_out(
    client: Redis, service: Service, directory: Directory
) -> None:
    """The leases of killed teachers delay a new model, they do not refuse it."""
    record = '{"id":"dead","address":"dead:1"}'
    await run_script(client, "register", keys.of_service(service), ["dead", 200, record, '{"name":"digits"}'])
    async with hold(client, service, teacher("b", LETTERS)):
        assert await ids(directory) == ["b"]
        assert await directory.contract("pool") == LETTERS


async def test_the_same_model_in_other_words_is_let_in(client: Redis, service: Service, directory: Directory) -> None:
    """Models are compared by what they say, not by how their JSON is written."""
    record = '{"id":"z","address":"z:1"}'
    contract = '{ "inputs": [{"shape": [-1, 784], "datatype": "FP32", "name": "image"}], "name": "digits" }'
    await run_script(client, "register", keys.of_service(service), ["z", 60_000, record, contract])
    async with hold(client, service, teacher()):
        assert await ids(directory) == ["a", "z"]


async def test_a_cancelled_reader_ends(directory: Directory) -> None:
    """Whenever a cancellation comes, also just as a command was sent, it is not lost."""

    async def read_for_ever() -> None:
        while True:
            await directory.members("pool")

    for delay in range(0, 400, examples(4, 1)):
        reader = asyncio.create_task(read_for_ever())
        await asyncio.sleep(delay * 1e-5)
        reader.cancel()
        ended, _ = await asyncio.wait([reader], timeout=30)
        assert ended


async def test_a_record_that_nobody_can_read_hides_no_other(
    client: Redis, service: Service, directory: Directory
) -> None:
    """One member written by something else is left out, the rest is listed."""
    await run_script(client, "register", keys.of_service(service), ["odd", 60_000, '{"weight":"much"}', ""])
    async with hold(client, service, teacher()):
        assert await ids(directory) == ["a"]


@pytest.mark.parametrize("url", ["redis://:secret@127.0.0.1:1/0", "redis://:secret@HERE", "redis://HERE"])
async def test_a_redis_that_can_not_be_used_is_said_so_at_once(url: str, redis_url: str, service: Service) -> None:
    """Nobody there, a wrong password or none: an error with the address, without the password, after one attempt."""
    url = url.replace("HERE", redis_url.rpartition("@")[2])
    async with connect(url) as client, asyncio.timeout(30):
        for attempt in (
            Directory(client, "n").members("p"),
            Directory(client, "n").pools(),
            anext(Directory(client, "n").watch("p")),
            hold(client, service, teacher()).__aenter__(),
        ):
            with pytest.raises(RegistryUnavailableError) as caught:
                await attempt
            assert f"Redis at {address_of(url)}" in str(caught.value)
            assert "secret" not in str(caught.value)
