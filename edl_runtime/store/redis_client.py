"""The connection to Redis: scripts, JSON records, and Redis's failures as this project's errors."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.parsing import JsonDecoder
from edl_runtime.store.errors import MalformedRecordError, RegistrySilentError, RegistryUnavailableError

if TYPE_CHECKING:
    from redis.asyncio import Redis

CONNECT_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 1.5
"""Longest wait for any one answer, so a command that blocks in Redis has to block for less."""

_SCHEMES = ("redis://", "rediss://", "unix://")

_NOT_NOW = re.compile(r"\b(MISCONF|NOREPLICAS|READONLY|LOADING|BUSY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN)\b")
"""How Redis says that it can't serve at the moment. What a command in a script meets comes in mid-sentence."""

_MISREAD = re.compile(
    r"WRONGTYPE|attempt to|bad argument|command arguments must|but found|not an integer|not a valid float"
)
"""How Redis says that a script of ours can't work with what it has read, which is another type or no number."""


def connect(url: str, *, connections: int | None = None) -> Redis:
    """Return a client of the Redis at `url` (redis://, rediss:// or unix://, with user and password in it).

    Connects with the first command, tries each command once and gives up within `ANSWER_TIMEOUT_S`: retrying is the
    caller's business. Texts come back as str, with escapes for bytes that are no UTF-8. Close it (`async with`).
    Raises SpecError for what is no such URL.

    At most so many `connections` are opened, and commands wait for a free one; by default 100, beyond which commands
    fail.
    """
    from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    allowed = "redis://, rediss:// or unix://, as in redis://127.0.0.1:6379/0"
    if not url.startswith(_SCHEMES):
        raise SpecError("redis_url", _without_secrets(url), allowed)
    options = {
        "decode_responses": True,
        "encoding_errors": "backslashreplace",  # what is no UTF-8 is no record of ours, and no reason to fail here
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": ANSWER_TIMEOUT_S,
    }
    try:
        if connections is None:
            return Redis.from_pool(ConnectionPool.from_url(url, **options))
        limits = {"max_connections": connections, "timeout": ANSWER_TIMEOUT_S}
        return Redis.from_pool(BlockingConnectionPool.from_url(url, **limits, **options))
    except ValueError:  # half an IPv6 address, or a port or an option that is no number
        raise SpecError("redis_url", address_of(url), allowed) from None


def address_of(url: str) -> str:
    """Return "host:port" (or a socket's path) of a Redis URL, for messages: never user or password."""
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError:  # half an IPv6 address, or a port that is no number
        return _without_secrets(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{port}"


def _without_secrets(url: str) -> str:
    """Return what of a text that may be no URL is safe to show: neither user and password nor options."""
    return url.rpartition("@")[2].partition("?")[0]


@contextmanager
def unavailable_if_lost(client: Redis) -> Iterator[None]:
    """Raise RegistryUnavailableError for whatever says that Redis can't be reached, read or written.

    Every command runs inside one of these, for it also makes a cancelled command end: the client library sends by
    `asyncio.wait_for`, which until Python 3.12 may lose a cancellation that comes just as it is done.
    """
    from redis import exceptions

    lost = (
        OSError,
        exceptions.ConnectionError,  # also a wrong password, loading, too many clients
        exceptions.TimeoutError,
        exceptions.NoPermissionError,
        exceptions.OutOfMemoryError,
        exceptions.ReadOnlyError,
        exceptions.MasterDownError,
        exceptions.ClusterDownError,
        exceptions.TryAgainError,
    )
    task = asyncio.current_task()
    cancelled_before = task.cancelling() if task else 0
    failure: Exception | None = None
    try:
        yield
    except lost as error:
        failure = error
    except exceptions.ResponseError as error:
        if not _NOT_NOW.search(str(error)):
            raise
        failure = error
    if task and task.cancelling() > cancelled_before:
        raise asyncio.CancelledError
    if failure is not None:
        if isinstance(failure, exceptions.TimeoutError | TimeoutError):
            raise RegistrySilentError(_address(client), "it is silent")
        raise RegistryUnavailableError(_address(client), _cause(failure))


async def run_script(client: Redis, name: str, keys: Sequence[str], args: Sequence[str | int]) -> Any:
    """Run `name`.lua of this folder on `keys` in one step and return its answer.

    Shared files are prepended: `_clock.lua` always, `_history.lua` and, for example, `_group.lua` for `group_heartbeat`,
    `_registry.lua` for the registry's scripts, which have names of one word. Raises MalformedRecordError,
    RegistryUnavailableError.
    """
    with unavailable_if_lost(client), _malformed_if_misread(keys):
        return await client.register_script(_text(name))(keys=list(keys), args=list(args))


async def run_script_on_each(client: Redis, name: str, each: Sequence[Sequence[str]]) -> list[Any]:
    """Run `name`.lua, which takes no arguments, on each of these lists of keys; return its answers, in order.

    All of them travel together, and each is one step of its own. Raises MalformedRecordError, RegistryUnavailableError.
    """
    with unavailable_if_lost(client), _malformed_if_misread([key for keys in each for key in keys]):
        script = client.register_script(_text(name))
        async with client.pipeline(transaction=False) as pipeline:
            for keys in each:
                await script(keys=list(keys), client=pipeline)
            return await pipeline.execute()


@contextmanager
def _malformed_if_misread(keys: Sequence[str]) -> Iterator[None]:
    """Raise MalformedRecordError for what a script can't work with. It may be at any of its keys."""
    from redis import exceptions

    try:
        yield
    except exceptions.ResponseError as error:
        if not _MISREAD.search(str(error)):
            raise
        where = keys[0] if len(keys) == 1 else f"{commonprefix(keys)}*"  # noqa: RUF071 - as texts
        raise MalformedRecordError(where, str(error)) from None


@functools.cache
def _text(name: str) -> str:
    folder = resources.files("edl_runtime.store")
    family, one_of_many, _ = name.partition("_")
    fronts = ["_history.lua", f"_{family}.lua"] if one_of_many else ["_registry.lua"]
    parts = [folder / file for file in ["_clock.lua", *fronts, f"{name}.lua"]]
    return "".join(part.read_text(encoding="utf-8") for part in parts if part.is_file())


def _address(client: Redis) -> str:
    where = client.connection_pool.connection_kwargs
    return str(where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}")


def _cause(error: Exception) -> str:
    said = str(error)
    code = _NOT_NOW.search(said)
    return said[code.start() :] if code else said or type(error).__name__


# What is kept in Redis as JSON, and may have been written by another version.

Record = TypeVar("Record")


def decode_record(content: str | bytes | None, kind: type[Record]) -> Record | None:
    """Return what was kept; None if nothing was, and for what this version can't read."""
    if content is None:
        return None
    try:
        return JsonDecoder(kind).decode(content)
    except msgspec.DecodeError:
        return None


@contextmanager
def malformed_if_unreadable(key: str) -> Iterator[None]:
    """Turn what the block raises about what `key` holds into a MalformedRecordError.

    That is a KeyError for a field that it lacks, a ValueError for what is no number, a msgspec.DecodeError.
    """
    try:
        yield
    except KeyError as error:
        raise MalformedRecordError(key, f"it lacks {error}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise MalformedRecordError(key, str(error)) from None


# Whether a Redis deletes keys when it is full, as managed ones do unless they are told not to.

NO_EVICTION = "noeviction"


async def eviction_warning(client: Redis) -> str:
    """Return what is to be set in this Redis for it to keep all that is in it, "" if it does.

    It is read from INFO, which a Redis that forbids CONFIG answers, too. Raises RegistryUnavailableError.
    """
    with unavailable_if_lost(client):
        memory: dict[str, Any] = await client.info("memory")
    policy, limit = memory.get("maxmemory_policy", NO_EVICTION), memory.get("maxmemory", 0)
    if policy == NO_EVICTION or not limit:
        return ""
    return (
        f"this Redis deletes keys when it is full (maxmemory-policy {policy}), leases and shards in hand among them; "
        f"set its maxmemory-policy to {NO_EVICTION}"
    )
