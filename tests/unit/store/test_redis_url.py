"""What the URL of sentinels says, and which of their answers counts."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError as NotConnectedError

from edl_runtime.store.redis_url import SentinelUrl
from edl_runtime.store.sentinel import Master, newest_master


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        (
            "redis+sentinel://one/main",
            SentinelUrl(hosts=(("one", 26379),), master="main", redis="redis://one:26379/0"),
        ),
        (
            "rediss+sentinel://me:p%40ss@one:7000,[::1]:7001/main/3?sentinel_password=a%26b&ssl_ca_certs=/ca.crt",
            SentinelUrl(
                hosts=(("one", 7000), ("::1", 7001)),
                master="main",
                redis="rediss://me:p%40ss@one:7000/3?ssl_ca_certs=%2Fca.crt",
                password="a&b",
            ),
        ),
        (
            "redis+sentinel://[::1]/main/?sentinel_username=edl&sentinel_password=sesame",
            SentinelUrl(
                hosts=(("::1", 26379),),
                master="main",
                redis="redis://[::1]:26379/0",
                username="edl",
                password="sesame",
            ),
        ),
    ],
)
def test_a_url_of_sentinels_has_two_logins(url: str, meant: SentinelUrl) -> None:
    """That before the hosts is the master's; the sentinels' own is among the options."""
    assert SentinelUrl.parse(url) == meant


def test_the_master_of_the_highest_epoch_counts() -> None:
    """Whatever a sentinel says that has not heard of the failover."""
    old, new = Master("old", 1, 4), Master("new", 1, 5)
    assert newest_master("main", [{"main": old}, {"main": new, "other": old}, {}]) == new


def test_an_unknown_master_is_told_with_those_that_are_known() -> None:
    """So that a typing error shows."""
    with pytest.raises(NotConnectedError, match="no master 'mian'; they know: main, other"):
        newest_master("mian", [{"main": Master("old", 1, 4)}, {"other": Master("old", 1, 4)}])
    with pytest.raises(NotConnectedError, match="they know: none"):
        newest_master("main", [{}])
