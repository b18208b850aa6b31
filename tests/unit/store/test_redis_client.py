"""What a Redis URL may be, what of it may be shown, which failures pass, and the rules of keys and scripts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from redis.exceptions import ClusterDownError, MasterDownError, RedisError, ResponseError, TryAgainError

import edl_runtime.store
from edl_runtime.errors import SpecError
from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError, RegistryUnavailableError
from edl_runtime.store.redis_client import connect, unavailable_if_lost
from edl_runtime.store.redis_url import address_of


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://127.0.0.1:7000/0", "127.0.0.1:7000"),
        ("redis://:secret@cache.example", "cache.example:6379"),
        ("rediss://user:secret@cache.example:7000/2", "cache.example:7000"),
        ("unix://:secret@/run/redis.sock", "/run/redis.sock"),
        ("redis://:secret@cache.example:port/0", "cache.example:port/0"),
        ("redis://:secret@[::1:6379?password=secret", "[::1:6379"),
        (
            "redis+sentinel://:secret@one:7000,two/main/0?sentinel_password=secret",
            "the master 'main' of the sentinels one:7000, two:26379",
        ),
        ("redis+sentinel://:secret@one", "one"),
    ],
)
def test_an_address_has_no_secrets(url: str, address: str) -> None:
    """Only host and port, or a socket's path, of a URL are for messages."""
    assert address_of(url) == address


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("", ""),
        ("redis", "redis"),
        ("cache:6379", "cache:6379"),
        ("http://:secret@h:1", "h:1"),
        ("redis://:secret@h:port/0", "h:port/0"),
        ("redis://:secret@h:1?db=secret", "h:1"),
        ("redis://:secret@[::1", "[::1"),
        ("redis://:secret@h:1/0?passwort=secret", "h:1"),
        ("redis://:secret@h:1/main", "h:1"),
        ("redis+sentinel://:secret@one,two?sentinel_password=secret", "one,two"),
        ("redis+sentinel://:secret@one,two/main/first", "one,two/main/first"),
        ("rediss+sentinel://:secret@one,,two/main", "one,,two/main"),
        ("redis+sentinel://:secret@[::1/main", "[::1/main"),
        ("redis+sentinel://:secret@one/main?socket_timeout=secret", "the master 'main' of the sentinels one:26379"),
    ],
)
async def test_what_is_no_redis_url_is_refused_without_its_password(url: str, shown: str) -> None:
    """The error says what is allowed, and shows what was given but for its secrets."""
    with pytest.raises(SpecError, match=r"redis://127\.0\.0\.1:6379/0") as caught:
        connect(url)
    assert caught.value.given == shown


@pytest.mark.parametrize(
    "error",
    [
        ResponseError("MISCONF Redis is configured to save RDB snapshots, but it is currently unable to persist"),
        ResponseError("NOREPLICAS Not enough good replicas to write. script: f00, on @user_script:12."),
        ResponseError("ERR Error running script (call to f_00): @user_script:9: -NOREPLICAS Not enough good replicas"),
        ResponseError("Error running script: -READONLY You can't write against a read only replica."),
        ResponseError("BUSY Redis is busy running a script."),
        MasterDownError("Link with MASTER is down"),
        ClusterDownError("The cluster is down"),
        TryAgainError("Multiple keys request during rehashing of slot"),
    ],
)
async def test_a_redis_that_can_not_serve_now_is_unavailable(error: RedisError) -> None:
    """A state that passes, as a failover or a full disk, is ridden out like a Redis that does not answer."""
    client = connect("redis://127.0.0.1:1/0")
    with pytest.raises(RegistryUnavailableError, match=r"127\.0\.0\.1:1 ") as caught, unavailable_if_lost(client):
        raise error
    assert "user_script:9" not in str(caught.value)
    await client.aclose()


async def test_what_is_wrong_with_a_command_is_no_unavailability() -> None:
    """A mistake of ours is not hidden by trying again."""
    client = connect("redis://127.0.0.1:1/0")
    with pytest.raises(ResponseError, match="unknown command"), unavailable_if_lost(client):
        raise ResponseError("unknown command 'GETT'")
    with pytest.raises(MalformedRecordError, match="WRONGTYPE"), unavailable_if_lost(client):
        raise ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
    await client.aclose()


def test_a_script_never_searches_the_keyspace() -> None:
    """KEYS and SCAN would read every key of everybody."""
    scripts = [path.read_text() for path in Path(edl_runtime.store.__file__).parent.glob("*.lua")]
    assert len(scripts) > 20
    assert not [text for text in scripts if re.search(r"redis\.call\('(KEYS|SCAN)'", text, re.IGNORECASE)]


def test_the_keys_of_a_service_share_a_slot() -> None:
    """Redis Cluster runs a script only if all its keys have one hash tag."""
    service = keys.Service("team", "digits", "students")
    tags = {re.findall(r"\{(.*?)\}", key)[0] for key in keys.service_keys(service)}
    assert tags == {"team/digits"}
