"""A client of a Redis that Sentinel watches: real servers, real sentinels, real failovers."""

from __future__ import annotations

import asyncio
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from support.network.certificates import Authority
from support.registry.sentinel import MASTER, SENTINEL_PASSWORD, Tls, WatchedRedis, watched_redis

from edl_runtime.store import keys, redis_client
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect, run_script, unavailable_if_lost
from edl_runtime.store.redis_server import find_redis_server

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def silent_masters_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as outside of tests."""
    monkeypatch.setattr(redis_client, "ANSWER_TIMEOUT_S", 1.5)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[WatchedRedis]:
    with watched_redis(tmp_path, replicas=1) as redis:
        yield redis


async def count(client: Redis) -> int:
    """Count one up, and try again as long as Redis can't be used; a try whose answer was lost counts once."""
    name = uuid.uuid4().hex
    async with asyncio.timeout(120):
        while True:
            try:
                with unavailable_if_lost(client):
                    await client.sadd("counted", name)
                    return int(await client.scard("counted"))
            except RegistryUnavailableError:
                await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("silent_masters_are_given_up")
async def test_a_client_follows_the_master(watched: WatchedRedis) -> None:
    """To a replica when the master is killed, and back; by new connections and by those it has open."""
    async with connect(watched.url) as client, connect(watched.url, connections=1) as limited:
        assert [await count(each) for each in (client, limited)] == [1, 2]
        await asyncio.to_thread(watched.await_replicas)
        first = watched.master
        first.kill()
        second = await asyncio.to_thread(watched.await_failover, first)
        assert [await count(each) for each in (client, limited)] == [3, 4]
        first.follow(second)
        first.start()
        await asyncio.to_thread(watched.await_replicas)
        second.pause()  # its connections stay open
        await asyncio.to_thread(watched.await_failover, second)
        assert [await count(each) for each in (client, limited)] == [5, 6]
        second.resume()


@pytest.mark.slow
async def test_a_client_leaves_a_master_that_has_become_a_replica(watched: WatchedRedis) -> None:
    """Also one that keeps its clients' connections, as when somebody demotes it by hand."""
    async with connect(watched.url) as client:
        await count(client)
        await asyncio.to_thread(watched.await_replicas)
        old, (new,) = watched.master, watched.replicas
        new.ask("REPLICAOF", "NO", "ONE")
        old.ask("REPLICAOF", "127.0.0.1", new.port)
        with pytest.raises(RegistryUnavailableError, match="is a replica now"):
            await run_script(client, "register", keys.service_keys(keys.Service("n", "p")), ["m", 1000, "{}", ""])
        for sentinel in watched.sentinels:
            sentinel.ask("SENTINEL", "REMOVE", MASTER)
            sentinel.ask("SENTINEL", "MONITOR", MASTER, "127.0.0.1", new.port, 2)
        assert await count(client) == 2


async def test_what_is_wrong_with_the_sentinels_is_told(watched: WatchedRedis) -> None:
    """Their password, the master's name, and that none answers; a client goes on with the last one that does."""

    async def complaint(url: str) -> str:
        async with connect(url) as client:
            with pytest.raises(RegistryUnavailableError) as caught, unavailable_if_lost(client):
                await client.ping()
            return str(caught.value)

    assert "add ?sentinel_password=…" in await complaint(watched.url.partition("?")[0])
    assert "refuses this login" in await complaint(watched.url.replace(SENTINEL_PASSWORD, "sesame"))
    unknown = await complaint(watched.url.replace(f"/{MASTER}/", "/mian/"))
    assert f"the sentinels know no master 'mian'; they know: {MASTER}" in unknown
    assert "the master 'mian' of the sentinels 127.0.0.1:" in unknown
    assert "invalid" in await complaint(watched.url.replace(":of-redis@", ":sesame@"))
    for sentinel in watched.sentinels[:2]:
        sentinel.kill()
    async with connect(watched.url) as client:
        assert await count(client) == 1
    watched.sentinels[2].kill()
    assert "no sentinel answers: 127.0.0.1:" in await complaint(watched.url)
    assert "of-" not in await complaint(watched.url)


@pytest.mark.slow
@pytest.mark.usefixtures("silent_masters_are_given_up")
async def test_a_sentinel_that_is_cut_off_leads_no_client_back(watched: WatchedRedis) -> None:
    """It still names the master that the others have replaced, and that still takes writes."""
    alone, others = watched.sentinels[0], watched.sentinels[1:]
    async with connect(watched.url) as client:
        await count(client)
        await asyncio.to_thread(watched.await_replicas)
        old, (new,) = watched.master, watched.replicas
        alone.kill()
        old.pause()
        assert await count(client) == 2
        for each in (*others, new):
            each.kill()
        old.resume()
        alone.start()
        with old.client() as there:
            assert there.set("written", 1)
        with pytest.raises(RegistryUnavailableError), unavailable_if_lost(client):
            await client.ping()  # its connection to the new master breaks
        with pytest.raises(RegistryUnavailableError, match="too few sentinels"), unavailable_if_lost(client):
            await client.ping()


def speaks_tls() -> bool:
    """Whether the redis-server of the tests is built with TLS: one without ends by itself, whatever the certificate."""
    said = subprocess.run(
        [str(find_redis_server()), "--port", "0", "--tls-port", "1", "--tls-cert-file", "/none"],
        capture_output=True,
        check=False,
        timeout=60,
    )
    return b"Failed to configure TLS" in said.stdout


@pytest.mark.slow
async def test_tls_reaches_sentinels_and_master(tmp_path: Path) -> None:
    """By one scheme and one authority; without the authority the error says what is not trusted."""
    if not speaks_tls():
        pytest.skip("this redis-server is built without TLS")
    authority = Authority(tmp_path / "ours")
    with watched_redis(
        tmp_path, replicas=1, tls=Tls(authority.sign("127.0.0.1", "localhost"), authority.ca)
    ) as watched:
        async with connect(watched.url) as client:
            assert await count(client) == 1
            await asyncio.to_thread(watched.await_replicas)
            first = watched.master
            first.kill()
            assert await count(client) == 2
        async with connect(watched.url.partition("&ssl_ca_certs")[0]) as client:
            with (
                pytest.raises(RegistryUnavailableError, match="CERTIFICATE_VERIFY_FAILED"),
                unavailable_if_lost(client),
            ):
                await client.ping()
