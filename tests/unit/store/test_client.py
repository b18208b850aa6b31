"""What a Redis URL may be, and what of it may be shown."""

from __future__ import annotations

import pytest

from edl_runtime.errors import SpecError
from edl_runtime.store.client import address_of, connect


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://127.0.0.1:7000/0", "127.0.0.1:7000"),
        ("redis://:secret@cache.example", "cache.example:6379"),
        ("rediss://user:secret@cache.example:7000/2", "cache.example:7000"),
        ("unix://:secret@/run/redis.sock", "/run/redis.sock"),
        ("redis://:secret@cache.example:port/0", "cache.example"),
    ],
)
def test_an_address_has_no_secrets(url: str, address: str) -> None:
    """Only host and port, or a socket's path, of a URL are for messages."""
    assert address_of(url) == address


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:6379", "http://:secret@h:1", "redis://:secret@h:port/0", "redis://:secret@h:1?db=secret"]
)
async def test_what_is_no_redis_url_is_refused_without_its_password(url: str) -> None:
    """The error says what is allowed and shows no more than host and port."""
    with pytest.raises(SpecError) as caught:
        connect(url)
    assert "redis://127.0.0.1:6379/0" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_a_good_url_connects_to_nothing_yet() -> None:
    """Making a client does no work, so it can't fail for a Redis that is away."""
    client = connect("redis://:secret@127.0.0.1:1/0")
    await client.aclose()
