"""The URLs that name a Redis: one server, or a master that Sentinel watches. Pure."""

from __future__ import annotations

import re
from typing import Self
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from edl_runtime.errors import SpecError

SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
"""The scheme of the master's own URL, by that of a URL of sentinels."""
SCHEMES = tuple(f"{scheme}://" for scheme in ("redis", "rediss", "unix", *SENTINEL_SCHEMES))

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379

ALLOWED = (
    "redis://, rediss:// or unix://, as in redis://127.0.0.1:6379/0, "
    "or redis+sentinel:// as in redis+sentinel://host1:26379,host2:26379/MASTER/0"
)

_HOST = re.compile(r"(\[[\da-fA-F:.%]+\]|[\w.-]+)(?::(\d{1,5}))?")


class SentinelUrl(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of redis+sentinel://[user:password@]host[:26379],host…/MASTER[/0][?options].

    - `hosts`: of the sentinels. `master`: the name that they know the master by.
    - `redis`: the URL of a Redis at the first of these hosts, with the login, number and options of the master.
    - `username`, `password`: the sentinels' own, from `sentinel_username` and `sentinel_password` of the options.
    """

    hosts: tuple[tuple[str, int], ...]
    master: str
    redis: str
    username: str = ""
    password: str = ""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read a URL of one of `SENTINEL_SCHEMES`. Raises SpecError."""
        try:
            parts = urlsplit(url)
        except ValueError:  # a malformed IPv6 address
            raise SpecError("redis_url", without_secrets(url), ALLOWED) from None
        login, at, listed = parts.netloc.rpartition("@")
        found = [_HOST.fullmatch(host) for host in listed.split(",")]
        master, _, number = parts.path.strip("/").partition("/")
        if None in found or not master or not (number or "0").isdigit():
            raise SpecError("redis_url", without_secrets(url), ALLOWED)
        hosts = tuple((each[1].strip("[]"), int(each[2] or SENTINEL_PORT)) for each in found if each)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        own = {name: options.pop(f"sentinel_{name}", "") for name in ("username", "password")}
        query = f"?{urlencode(options)}" if options else ""
        first = host_and_port(*hosts[0])
        redis = f"{SENTINEL_SCHEMES[parts.scheme]}://{login}{at}{first}/{number or 0}{query}"
        return cls(hosts=hosts, master=master, redis=redis, **own)

    @property
    def address(self) -> str:
        """The master and its sentinels, for messages."""
        return f"the master {self.master!r} of the sentinels {', '.join(host_and_port(*host) for host in self.hosts)}"


def is_sentinel_url(url: str) -> bool:
    """Whether the URL names sentinels, which name the master."""
    return url.partition("://")[0] in SENTINEL_SCHEMES


def address_of(url: str) -> str:
    """Return "host:port" (a socket's path; a master and its sentinels) for messages, without user and password."""
    try:
        if is_sentinel_url(url):
            return SentinelUrl.parse(url).address
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
    except (SpecError, ValueError):  # a malformed IPv6 address or port
        return without_secrets(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{port}"


def without_secrets(url: str) -> str:
    """Return the part of a text, which may not be a URL, that is safe to show: no user, password or options."""
    return url.rpartition("@")[2].partition("?")[0]


def host_and_port(host: str, port: int) -> str:
    """Return "host:port", with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
