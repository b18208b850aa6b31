"""The connection to Redis: scripts, JSON records, and Redis's failures as this project's errors."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakSet

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.parsing import JsonDecoder
from edl_runtime.store.errors import (
    MalformedRecordError,
    RegistryAccessError,
    RegistryTimeoutError,
    RegistryUnavailableError,
)
from edl_runtime.store.redis_url import ALLOWED, SCHEMES, SentinelUrl, address_of, is_sentinel_url, without_secrets

if TYPE_CHECKING:
    from redis.asyncio import ConnectionPool, Redis
    from redis.asyncio.client import Pipeline

Record = TypeVar("Record")

CONNECT_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 1.5
"""Longest wait for an answer. A command that blocks in Redis has to block for less."""

_NOT_NOW = re.compile(r"\b(MISCONF|NOREPLICAS|READONLY|LOADING|BUSY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN)\b")
"""Error codes of a Redis that can't serve at the moment; in a script's error the code is in the middle of the text."""

_CLOSED = "Connection closed by server"
"""What the library says when a server ends a connection without an answer, as one does that expects TLS."""

_answering: WeakSet[ConnectionPool] = WeakSet()
"""The pools of clients that a Redis has answered, so that it speaks as they do."""

_MISREAD = re.compile(
    r"WRONGTYPE|attempt to|bad argument|command arguments must|but found|not an integer|not a valid float"
)
"""Errors of a command or a script that has read a value of the wrong type."""


def connect(url: str, *, connections: int | None = None) -> Redis:
    """Return a client of the Redis at `url`: redis://, rediss:// or unix://, with user and password in it.

    Or of the master that Sentinel names, wherever it is: redis+sentinel:// or rediss+sentinel://, see `SentinelUrl`.

    Connects with the first command, tries each command once and fails after `ANSWER_TIMEOUT_S`; the caller retries.
    Texts are returned as str, with escapes for bytes that are no UTF-8. Close it (`async with`). Raises SpecError for
    another URL.

    With `connections`, at most so many are opened and commands wait for a free one. By default, commands fail beyond
    100.
    """
    from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    if not url.startswith(SCHEMES):
        raise SpecError("redis_url", without_secrets(url), ALLOWED)
    options: dict[str, Any] = {
        "decode_responses": True,
        "encoding_errors": "backslashreplace",  # such a record can't be ours; decoding must not fail here
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": ANSWER_TIMEOUT_S,
    }
    options |= _place_of(url, options)
    if connections is None:
        return Redis.from_pool(ConnectionPool(**options))
    return Redis.from_pool(BlockingConnectionPool(max_connections=connections, timeout=ANSWER_TIMEOUT_S, **options))


def _place_of(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of connections to the Redis at `url`, or to the master. Raises SpecError."""
    from redis.asyncio.connection import Connection, SSLConnection, parse_url

    from edl_runtime.store.tls_connection import TlsConnection

    sentinel_url = SentinelUrl.parse(url) if is_sentinel_url(url) else None
    at = sentinel_url.redis if sentinel_url else url
    try:
        place: dict[str, Any] = dict(parse_url(at))
        if not at.startswith("unix:"):
            int(urlsplit(at).path.strip("/") or 0)  # else the library takes the database 0
        kind = place.get("connection_class", Connection)
        kind(**{name: value for name, value in place.items() if name != "connection_class"})
    except (ValueError, TypeError):  # also a malformed IPv6 address, port or option, and one that there is not
        raise SpecError("redis_url", address_of(url), ALLOWED) from None
    is_tls = kind is SSLConnection
    if sentinel_url is None:
        return {**place, "connection_class": TlsConnection} if is_tls else place

    from edl_runtime.store.sentinel import MasterConnection, MasterTlsConnection, Sentinels

    del place["host"], place["port"]
    trust = {name: value for name, value in place.items() if name.startswith("ssl_")}
    login = {"username": sentinel_url.username or None, "password": sentinel_url.password or None}
    sentinels = Sentinels(sentinel_url, {**options, **trust, **login}, tls=is_tls)
    return {**place, "sentinels": sentinels, "connection_class": MasterTlsConnection if is_tls else MasterConnection}


@contextmanager
def unavailable_if_lost(client: Redis, *keys: str) -> Iterator[None]:
    """Raise RegistryUnavailableError for every error that means that Redis can't be reached, read or written.

    As RegistryAccessError where it refuses the password, as MalformedRecordError where one of `keys`, those that the
    commands use, holds something else than they expect.

    Every command has to run inside this, because it also makes cancellation work: the client library sends by
    `asyncio.wait_for`, which until Python 3.12 may lose a cancellation that arrives just as it is done.
    """
    from redis import exceptions

    lost = (
        OSError,
        exceptions.ConnectionError,  # also loading, too many clients
        exceptions.TimeoutError,
        exceptions.NoPermissionError,
        exceptions.OutOfMemoryError,
        exceptions.ReadOnlyError,
        exceptions.MasterDownError,
        exceptions.ClusterDownError,
        exceptions.TryAgainError,
        exceptions.InvalidResponse,  # another kind of server
    )
    task = asyncio.current_task()
    cancelled_before = task.cancelling() if task else 0
    failure: Exception | None = None
    try:
        yield
    except lost as error:
        failure = error
    except exceptions.ResponseError as error:
        if not (_MISREAD.search(str(error)) or _NOT_NOW.search(str(error))):
            raise
        failure = error
    else:
        _answering.add(client.connection_pool)
    if task and task.cancelling() > cancelled_before:
        raise asyncio.CancelledError
    if failure is not None:
        if isinstance(failure, exceptions.AuthenticationError):
            given = bool(client.connection_pool.connection_kwargs.get("password"))
            raise RegistryAccessError(address(client), str(failure).strip(), given)
        if isinstance(failure, exceptions.TimeoutError | TimeoutError):
            raise RegistryTimeoutError(address(client), "no answer in time")
        if isinstance(failure, exceptions.ResponseError) and _MISREAD.search(str(failure)):
            raise MalformedRecordError(_place(keys) or address(client), str(failure))
        raise RegistryUnavailableError(address(client), _cause(client, failure))


async def run_script(client: Redis, name: str, keys: Sequence[str], args: Sequence[str | int]) -> Any:
    """Run `name`.lua of this folder on `keys` in one step and return its answer.

    Shared files are prepended: always `_clock.lua`; `_history.lua` and, for example, `_group.lua` for
    `group_heartbeat`; `_registry.lua` for the registry's scripts, which have names of one word. Raises
    MalformedRecordError, RegistryUnavailableError.
    """
    with unavailable_if_lost(client, *keys):
        return await client.register_script(_text(name))(keys=list(keys), args=list(args))


async def run_script_on_each(
    client: Redis, name: str, each: Sequence[Sequence[str]], args: Sequence[str | int] = ()
) -> list[Any]:
    """Run `name`.lua on each of these lists of keys, with the same arguments; return its answers, in order.

    One round trip, but not one transaction. Where keys hold something else than the script expects, the answer is a
    MalformedRecordError. Raises RegistryUnavailableError.
    """
    script = client.register_script(_text(name))
    async with client.pipeline(transaction=False) as pipeline:
        for keys in each:
            await script(keys=list(keys), args=list(args), client=pipeline)
        return await answers_of_each(client, pipeline, each)


async def answers_of_each(client: Redis, commands: Pipeline, each: Sequence[Sequence[str]]) -> list[Any]:
    """Send a pipeline of one command for each of these lists of keys; return the answers, in order.

    Where keys hold something else than the command expects, the answer is a MalformedRecordError. Raises
    RegistryUnavailableError.
    """
    if not each:
        return []
    with unavailable_if_lost(client, *(key for keys in each for key in keys)):
        answers = await commands.execute(raise_on_error=False)
    return [_answer(client, keys, answer) for keys, answer in zip(each, answers, strict=True)]


def _answer(client: Redis, keys: Sequence[str], answer: Any) -> Any:
    if not isinstance(answer, Exception):
        return answer
    try:
        with unavailable_if_lost(client, *keys):
            raise answer
    except MalformedRecordError as error:
        return error


def readable(answer: Record | MalformedRecordError) -> Record:
    """Return one of several answers, or what was made of it. Raises it if it is a MalformedRecordError."""
    if isinstance(answer, MalformedRecordError):
        raise answer
    return answer


def _place(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{commonprefix(keys)}*" if keys else ""  # noqa: RUF071 - as texts


@functools.cache
def _text(name: str) -> str:
    folder = resources.files("edl_runtime.store")
    family, one_of_many, _ = name.partition("_")
    fronts = ["_history.lua", f"_{family}.lua"] if one_of_many else ["_registry.lua"]
    parts = [folder / file for file in ["_clock.lua", *fronts, f"{name}.lua"]]
    return "".join(part.read_text(encoding="utf-8") for part in parts if part.is_file())


def address(client: Redis) -> str:
    """Return where a client's Redis is, for messages."""
    where = client.connection_pool.connection_kwargs
    if "sentinels" in where:
        return str(where["sentinels"])
    return str(where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}")


def _cause(client: Redis, error: Exception) -> str:
    from redis.asyncio.connection import SSLConnection

    text, pool = str(error), client.connection_pool
    code = _NOT_NOW.search(text)
    if text.startswith(_CLOSED) and pool not in _answering and not issubclass(pool.connection_class, SSLConnection):
        return f"{_CLOSED}; if it speaks TLS: the connection's `Redis over TLS`, or rediss:// in EDL_REDIS_URL"
    return text[code.start() :] if code else text or type(error).__name__


# JSON records in Redis, which another version may have written.


def decode_record(content: str | bytes | None, kind: type[Record]) -> Record | None:
    """Return the record; None if there is none, or this version can't read it."""
    if content is None:
        return None
    try:
        return JsonDecoder(kind).decode(content)
    except msgspec.DecodeError:
        return None


@contextmanager
def malformed_if_unreadable(key: str) -> Iterator[None]:
    """Turn a KeyError (missing field), ValueError or msgspec.DecodeError of the block into MalformedRecordError."""
    try:
        yield
    except UNREADABLE as error:
        raise malformed(key, error) from None


UNREADABLE = (KeyError, ValueError, msgspec.DecodeError)


def malformed(key: str, error: Exception) -> MalformedRecordError:
    """Return one of these errors as MalformedRecordError; a KeyError is a missing field."""
    return MalformedRecordError(key, f"it has no {error}" if isinstance(error, KeyError) else str(error))


# Whether a Redis deletes keys when it is full, which is the default of managed ones.

NO_EVICTION = "noeviction"


async def eviction_warning(client: Redis) -> str:
    """Return a warning if this Redis deletes keys when it is full, else "". Raises RegistryUnavailableError.

    Reads INFO, because CONFIG may be forbidden.
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
