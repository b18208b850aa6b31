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

from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.registry import lease as lease_module
from edl_runtime.registry.directory import Directory
from edl_runtime.registry.drain import drain, is_drained, undo_drain
from edl_runtime.registry.errors import DrainedError, PoolMismatchError, SupersededError, UnknownTeacherError
from edl_runtime.registry.lease import Lease, hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError, RegistryUnavailableError
from edl_runtime.store.keys import Service
from edl_runtime.store.redis_client import address_of, connect, run_script

if TYPE_CHECKING:
    from redis.asyncio import Redis

DIGITS = ModelSignature(name="digits", inputs=(TensorSpec("image", "FP32", (-1, 784)),))
LETTERS = ModelSignature(name="letters", inputs=(TensorSpec("image", "FP32", (-1, 784)),))


@pytest.fixture(autouse=True)
def _renewed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for a renewal, and no lease is so short that it runs out where nobody has CPU."""
    monkeypatch.setattr(lease_module, "RENEW_EVERY_S", 0.02)


class Pool:
    """A pool, as those in it have it and as others see it."""

    def __init__(self, client: Redis, namespace: str) -> None:
        self.client = client
        self.service = Service(namespace, "pool")
        self.directory = Directory(client, namespace)

    def hold(self, name: str = "a", model: ModelSignature = DIGITS) -> AbstractAsyncContextManager[Lease]:
        member = Member(id=name, address=f"{name}:1", signature=model)
        return hold_lease(self.client, self.service, member, ttl_s=60)

    async def run(self, script: str, words: list[Any]) -> Any:
        return await run_script(self.client, script, keys.service_keys(self.service), words)

    async def ids(self) -> list[str]:
        return [member.id for member in await self.directory.members("pool")]


@pytest.fixture
async def pool(redis_url: str, namespace: str) -> AsyncIterator[Pool]:
    async with connect(redis_url) as client:
        yield Pool(client, namespace)


async def until_anew(lease: Lease, before: int) -> None:
    async with asyncio.timeout(100):
        while lease.fence == before:  # noqa: ASYNC110 - a lease tells nobody
            await asyncio.sleep(0.01)


async def test_a_member_is_listed_from_the_first_line_of_the_block_to_its_end(pool: Pool) -> None:
    """Registered means listed, with all its data; left means gone at once, and the pool with it."""
    async with pool.hold() as lease:
        [listed] = await pool.directory.members("pool")
        assert listed == Member(id="a", address="a:1", signature=DIGITS, fence=lease.fence)
        assert await pool.directory.pools() == ["pool"]
        assert await pool.directory.contract("pool") == DIGITS
    assert await pool.directory.members("pool") == []
    assert await pool.directory.contract("pool") is None
    assert await pool.directory.pools() == []


async def test_a_pool_is_listed_again_by_a_redis_that_lost_the_list(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member says from time to time that its pool is one, though its lease is as it was."""
    monkeypatch.setattr(lease_module, "ADD_TO_POOL_LIST_EVERY_S", 0.0)
    async with pool.hold(), asyncio.timeout(100):
        await pool.client.delete(keys.pools(pool.service.namespace))
        while await pool.directory.pools() == []:  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.01)


async def test_a_pool_that_is_joined_while_it_is_struck_off_stays_listed(pool: Pool) -> None:
    """A reader that found a pool empty, and then somebody joins, does not hide it."""
    async with pool.hold():
        assert await pool.directory._forget("pool") is False
        assert await pool.directory.pools() == ["pool"]


async def test_an_expired_lease_is_registered_again_with_a_larger_fence(pool: Pool) -> None:
    """Renewing puts its end off; a holder that was stopped for too long is a new member, and the only one."""
    async with pool.hold() as lease, asyncio.timeout(100):
        before, ends_at = lease.fence, await pool.client.zscore(keys.service_key(pool.service, "leases"), "a")
        while await pool.client.zscore(keys.service_key(pool.service, "leases"), "a") == ends_at:  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.01)
        assert lease.fence == before
        await pool.run("release", ["a", lease._holder])
        await until_anew(lease, before)
        assert lease.fence > before
        assert await pool.run("release", ["a", "another"]) == 0
        assert await pool.run("renew", ["a", "another", 1000, ""]) == "taken"
        assert await pool.ids() == ["a"]


async def test_a_holder_that_missed_the_answer_to_its_registration_is_not_superseded(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A starved process gives an answer up that Redis has given: it goes on with the registration that it finds."""
    missed = asyncio.Event()

    async def without_an_answer(client: Redis, name: str, *words: Any) -> Any:
        answer = await run_script(client, name, *words)
        if name == "register" and not missed.is_set():
            missed.set()
            raise RegistryUnavailableError("here", "it is silent")
        return answer

    async with pool.hold() as lease:
        before = lease.fence
        monkeypatch.setattr(lease_module, "run_script", without_an_answer)
        await pool.client.delete(*keys.service_keys(pool.service))
        await until_anew(lease, before)
        assert missed.is_set()
        [listed] = await pool.directory.members("pool")
        assert listed.fence == lease.fence > before


async def test_what_expires_goes_a_day_after_the_members_and_no_earlier(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it stays as long as members do, for renewing puts its end off; the counter, news and clock stay longer."""
    monkeypatch.setattr(lease_module, "ADD_TO_POOL_LIST_EVERY_S", 0.0)
    kept = [
        keys.service_key(pool.service, "events"),
        keys.service_key(pool.service, "fence"),
        keys.service_key(pool.service, "clock"),
    ]
    async with pool.hold() as lease, asyncio.timeout(100):
        fence = lease.fence
        there = [*kept, *map(str, await pool.client.keys(f"*{{{pool.service.namespace}*"))]
        assert set(there) > {keys.service_key(pool.service, "leases"), keys.pools(pool.service.namespace)}
        for key in there:
            await pool.client.expire(key, 60)
        while min([await pool.client.ttl(key) for key in there]) <= 60:  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.01)
        assert lease.fence == fence
    assert sorted(await pool.client.keys(f"*{{{pool.service.namespace}/{pool.service.pool}}}*")) == sorted(kept)
    assert all([86_000 < await pool.client.ttl(key) <= 86_400 for key in kept])


async def test_without_what_expires_tokens_still_grow_and_watchers_see_all(pool: Pool) -> None:
    """A counter that is gone begins at Redis's clock, above all it gave before; news are told anew."""
    async with (
        pool.hold() as lease,
        contextlib.aclosing(pool.directory.watch("pool")) as changes,
        asyncio.timeout(100),
    ):
        assert [member.id for member in await anext(changes)] == ["a"]
        await pool.client.delete(keys.service_key(pool.service, "events"), keys.service_key(pool.service, "fence"))
        await asyncio.sleep(0.01)  # Redis's clock counts in ms
        async with pool.hold("b") as second:
            assert second.fence > lease.fence
            assert [member.id for member in await anext(changes)] == ["a", "b"]
        assert [member.id for member in await anext(changes)] == ["a"]


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_later_registration_of_an_id_supersedes_the_earlier(pool: Pool, lost: int) -> None:
    """The earlier holder is told, does not fight back, and does not take the later one down by leaving.

    Also where a failover has `lost` the count of the earlier one, so that both have one token.
    """
    async with pool.hold() as earlier, contextlib.AsyncExitStack() as stack:
        await pool.client.decrby(keys.service_key(pool.service, "fence"), lost)
        later = await stack.enter_async_context(pool.hold())
        assert later.fence - earlier.fence == 1 - lost
        assert isinstance(await asyncio.wait_for(earlier.wait_rejected(), 100), SupersededError)
        assert [member.fence for member in await pool.directory.members("pool")] == [later.fence]


@pytest.fixture
def _dead_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is refused is told that the pool's leases end in a moment; their holders renew them by then."""

    async def soon(client: Redis, name: str, *words: Any) -> Any:
        answer = await run_script(client, name, *words)
        return [*answer[:2], 1] if name == "register" and not answer[0] else answer

    monkeypatch.setattr(lease_module, "run_script", soon)


@pytest.mark.usefixtures("_dead_soon")
async def test_a_teacher_of_another_model_is_refused(pool: Pool) -> None:
    """The error names the pool and what differs; the pool keeps its model until its last teacher has left."""
    async with pool.hold():
        async with pool.hold("b"):
            pass
        with pytest.raises(PoolMismatchError, match="name is letters and the pool's digits") as caught:
            async with pool.hold("b", LETTERS):
                pytest.fail("it was let in")
        assert caught.value.pool == "pool"
        assert await pool.ids() == ["a"]
        assert await pool.directory.contract("pool") == DIGITS
    assert await pool.directory.contract("pool") is None


@pytest.mark.usefixtures("_dead_soon")
async def test_a_pool_taken_over_by_another_model_refuses_returning_teachers(pool: Pool) -> None:
    """A teacher whose pool has become another's learns that it can never come back."""
    record, contract = '{"id":"b","address":"b:1"}', msgspec.json.encode(LETTERS).decode()
    async with pool.hold() as lease:
        async with pool.client.pipeline(transaction=True) as at_once:
            at_once.delete(*keys.service_keys(pool.service))
            at_once.zadd(keys.service_key(pool.service, "leases"), {"b": 9e12})
            at_once.hset(keys.service_key(pool.service, "records"), "b", record)
            at_once.set(keys.service_key(pool.service, "contract"), contract)
            await at_once.execute()
        assert isinstance(await asyncio.wait_for(lease.wait_rejected(), 100), PoolMismatchError)
        assert await pool.ids() == ["b"]


async def test_a_pool_can_start_again_with_another_model_while_dead_teachers_run_out(pool: Pool) -> None:
    """The leases of killed teachers delay a new model, they do not refuse it."""
    record = '{"id":"dead","address":"dead:1"}'
    await pool.run("register", ["dead", 200, record, '{"name":"digits"}'])
    async with pool.hold("b", LETTERS):
        assert await pool.ids() == ["b"]
        assert await pool.directory.contract("pool") == LETTERS


async def test_the_same_model_in_another_encoding_joins(pool: Pool) -> None:
    """Models are compared by what they say, not by how their JSON is written."""
    record = '{"id":"z","address":"z:1"}'
    contract = '{ "inputs": [{"shape": [-1, 784], "datatype": "FP32", "name": "image"}], "name": "digits" }'
    await pool.run("register", ["z", 60_000, record, contract])
    async with pool.hold():
        assert await pool.ids() == ["a", "z"]


async def test_a_cancelled_reader_ends(pool: Pool) -> None:
    """Whenever a cancellation comes, also just as a command was sent, it is not lost."""

    async def read_for_ever() -> None:
        while True:
            await pool.directory.members("pool")

    for delay in range(0, 400, examples(4, 1)):
        reader = asyncio.create_task(read_for_ever())
        await asyncio.sleep(delay * 1e-5)
        reader.cancel()
        ended, _ = await asyncio.wait([reader], timeout=100)
        assert ended


async def test_an_unreadable_record_hides_no_other(pool: Pool) -> None:
    """One member written by something else is left out, the rest is listed."""
    await pool.run("register", ["odd", 60_000, '{"weight":"much"}', ""])
    async with pool.hold():
        assert await pool.ids() == ["a"]


@pytest.mark.parametrize("url", ["redis://:secret@127.0.0.1:1/0", "redis://:secret@HERE", "redis://HERE"])
async def test_an_unusable_redis_is_an_error_at_once(url: str, redis_url: str) -> None:
    """Nobody there, a wrong password or none: an error with the address, without the password, after one attempt."""
    url = url.replace("HERE", redis_url.rpartition("@")[2])
    async with connect(url) as client, asyncio.timeout(100):
        pool = Pool(client, "n")
        watch = pool.directory.watch("p")
        for attempt in (pool.ids(), pool.directory.pools(), anext(watch), pool.hold().__aenter__()):
            with pytest.raises(RegistryUnavailableError) as caught:
                await attempt
            assert f"Redis at {address_of(url)}" in str(caught.value)
            assert "secret" not in str(caught.value)


async def test_an_unreadable_contract_is_named_in_the_error(pool: Pool) -> None:
    """Others see the pool without its model."""
    async with pool.hold("a"):
        await pool.client.set(keys.service_key(pool.service, "contract"), '{"name": 7}')
        assert await pool.directory.contract("pool") is None
        with pytest.raises(MalformedRecordError, match="contract"):
            async with pool.hold("b", LETTERS):
                raise AssertionError
        assert await pool.ids() == ["a"]


async def test_a_drained_member_leaves_at_once_and_is_told(pool: Pool) -> None:
    """Its process learns of it with its next renewal, and the others stay; another process may take the id."""
    namespace = pool.service.namespace
    async with pool.hold("b"):
        async with pool.hold() as lease:
            await drain(pool.client, namespace, "pool", "a:1")
            assert await pool.ids() == ["b"]
            async with asyncio.timeout(100):
                assert isinstance(await lease.wait_rejected(), DrainedError)
        assert await is_drained(pool.client, pool.service, "a")
        with pytest.raises(UnknownTeacherError, match="has no teacher 'a'; there are: b"):
            await drain(pool.client, namespace, "pool", "a")
        async with pool.hold():
            assert await pool.ids() == ["a", "b"]
            assert not await is_drained(pool.client, pool.service, "a")


async def test_a_drain_is_undone_by_name(pool: Pool) -> None:
    """Only that of a member that was drained; the mark does not stay for ever."""
    namespace = pool.service.namespace
    async with pool.hold():
        await drain(pool.client, namespace, "pool", "a")
        assert await is_drained(pool.client, pool.service, "a")
        assert 0 < await pool.client.ttl(keys.service_key(pool.service, "drained")) <= 86_400
        with pytest.raises(UnknownTeacherError, match="has no drained teacher 'b'; there are: a"):
            await undo_drain(pool.client, namespace, "pool", "b")
        await undo_drain(pool.client, namespace, "pool", "a")
        assert not await is_drained(pool.client, pool.service, "a")
