"""A Redis user for each namespace, that reaches the keys and channels of that namespace alone."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Self
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.store.redis_client import address, unavailable_if_lost
from edl_runtime.store.redis_url import address_of

if TYPE_CHECKING:
    from redis.asyncio import Redis

PERIOD_S = 7 * 24 * 3600.0
"""How long new jobs get the same password."""

SKEW_S = 3600.0
"""How far the clocks of those that make jobs may be apart."""


_REFUSES = re.compile("no permissions|unknown (sub)?command", re.IGNORECASE)


class NamespaceUser(msgspec.Struct, frozen=True, kw_only=True):
    """The Redis user of a namespace. Its passwords follow from a `key`, so nobody has to keep them.

    A password is for the jobs of one period, and ends with the oldest of them. `key`: never log, store or send it.
    """

    namespace: str
    key: str

    @classmethod
    def of(cls, namespace: str, redis_url: str) -> Self:
        """Return the user whose key is the password in this URL. Raises SpecError for a URL without one."""
        password = unquote(urlsplit(redis_url).password or "")
        if not password:
            allowed = "a URL with a password, from which those of the namespaces' own users are derived"
            raise SpecError("EDL_REDIS_URL", address_of(redis_url), allowed)
        return cls(namespace=namespace, key=password)

    def __repr__(self) -> str:
        return f"NamespaceUser(namespace={self.namespace!r})"

    @property
    def name(self) -> str:
        return f"edl-{self.namespace}"

    def password(self, at: float) -> str:
        """Return the password of jobs that are made at this Unix time."""
        message = f"edl user of {self.namespace}, {at // PERIOD_S:.0f}"
        return hmac.new(self.key.encode(), message.encode(), "sha256").hexdigest()

    def passwords(self, made_at: Iterable[float], now: float) -> list[str]:
        """Return those that jobs may have which were made at these Unix times, or are being made."""
        first = (min(made_at, default=now) - SKEW_S) // PERIOD_S
        last = (now + SKEW_S) // PERIOD_S
        return [self.password(number * PERIOD_S) for number in range(int(min(first, last)), int(last) + 1)]

    def url(self, redis_url: str, at: float) -> str:
        """Return a URL with this user's login for a job that is made at this Unix time, instead of the login in it."""
        parts = urlsplit(redis_url)
        login = f"{quote(self.name, safe='')}:{self.password(at)}"
        return urlunsplit(parts._replace(netloc=f"{login}@{parts.netloc.rpartition('@')[2]}"))


def access_rules(namespace: str) -> list[str]:
    """Return the rules of Redis's ACL for all that jobs of a namespace need.

    Its keys are `edl:{NAMESPACE}:…` and `edl:{NAMESPACE/JOB}:…`, its channels begin as the latter. A pattern without
    that "}" or "/" would reach other namespaces whose names begin alike. Leases of checkpoint folders are everybody's,
    because two namespaces may name one folder.
    """
    keys = [f"~edl:{{{namespace}}}:*", f"~edl:{{{namespace}/*", "~edl:{checkpoint-folder/*"]
    commands = ["+@all", "-@admin", "-@dangerous", "-scan", "-randomkey", "-script"]
    return [*keys, f"&edl:{{{namespace}/*", *commands, "+info", "+script|load", "+script|exists"]


async def check_users(client: Redis, user: NamespaceUser) -> None:
    """Raise SpecError unless this Redis, and the client's own user, can make users; RegistryUnavailableError.

    A user that is there already stays as it is.
    """
    await _set_user(client, user.name)


async def set_user(client: Redis, user: NamespaceUser, passwords: Collection[str]) -> None:
    """Make the user, or change it to have these passwords and no others.

    Raises SpecError where this Redis, or the client's own user, can't make users; RegistryUnavailableError.
    """
    hashes = [f"#{hashlib.sha256(each.encode()).hexdigest()}" for each in passwords]  # Redis's logs show commands
    await _set_user(client, user.name, "reset", "on", *hashes, *access_rules(user.namespace))


async def _set_user(client: Redis, name: str, *rules: str) -> None:
    from redis.exceptions import ResponseError

    refused: ResponseError | None = None
    with unavailable_if_lost(client):
        try:
            await client.execute_command("ACL SETUSER", name, *rules)  # type: ignore[no-untyped-call]
        except ResponseError as error:
            if not _REFUSES.search(str(error)):
                raise
            refused = error
    if refused:
        allowed = f"one that can make a user for each namespace by ACL SETUSER, but: {refused}"
        raise SpecError("Redis", address(client), allowed)
