"""Connections to the master that Sentinel names. Imported with the first connection only, because it imports redis."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.asyncio.connection import Connection
from redis.exceptions import AuthenticationError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as NotConnectedError

from edl_runtime.store.redis_url import SentinelUrl, host_and_port
from edl_runtime.store.tls_connection import TlsConnection


class Master(NamedTuple):
    """Where the master is. `epoch`: of that configuration; each failover raises it."""

    host: str
    port: int
    epoch: int


class Sentinels:
    """The sentinels of one master. `epoch` is the highest that they have named; -1 before the first.

    `options`: of the connections to them, as login, trust and time limits.
    """

    def __init__(self, url: SentinelUrl, options: dict[str, Any], *, tls: bool) -> None:
        self.epoch = -1
        self._url = url
        self._connection_class = TlsConnection if tls else Connection
        self._options = options

    def __str__(self) -> str:
        return self._url.address

    async def find_master(self) -> Master:
        """Ask all sentinels at once, and return the master of the highest epoch once most have answered.

        A sentinel that is cut off from the others may name a master that they have replaced. So when most do not
        answer, a master of an earlier epoch than one that was named before does not count. Raises redis's
        ConnectionError.
        """
        asked = [asyncio.create_task(self._ask(*host)) for host in self._url.hosts]
        answers: list[dict[str, Master]] = []
        failures: list[str] = []
        try:
            for each in asyncio.as_completed(asked):
                try:
                    answers.append(await each)
                except NotConnectedError as error:
                    failures.append(str(error))
                if is_most(answers, asked):
                    break
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if not answers:
            raise NotConnectedError(f"no sentinel answers: {'; '.join(sorted(failures))}")
        master = newest_master(self._url.master, answers)
        if master.epoch < self.epoch and not is_most(answers, asked):
            raise NotConnectedError(
                f"too few sentinels answer, and those that do name the master of epoch {master.epoch}, "
                f"which that of {self.epoch} has replaced: {'; '.join(sorted(failures))}"
            )
        self.epoch = master.epoch
        return master

    async def _ask(self, host: str, port: int) -> dict[str, Master]:
        """Return the masters that a sentinel knows, by name. Raises redis's ConnectionError with its address."""
        asked = self._connection_class(host=host, port=port, protocol=2, **self._options)
        try:
            await asked.connect()  # type: ignore[no-untyped-call]
            await asked.send_command("SENTINEL", "MASTERS")
            answer: list[list[str]] = await asked.read_response()
        except AuthenticationError:
            cause = (
                "it refuses this login; add ?sentinel_password=… to the URL, and sentinel_username=… if it has users"
            )
            raise NotConnectedError(f"{host_and_port(host, port)}: {cause}") from None
        except (RedisError, OSError) as error:
            raise NotConnectedError(f"{host_and_port(host, port)}: {error or type(error).__name__}") from None
        finally:
            await asked.disconnect(nowait=True)
        states = [dict(zip(fields[::2], fields[1::2], strict=True)) for fields in answer]
        return {of["name"]: Master(of["ip"], int(of["port"]), int(of["config-epoch"])) for of in states}


def is_most(answers: Sequence[object], asked: Sequence[object]) -> bool:
    """Whether more than half have answered."""
    return len(answers) > len(asked) // 2


def newest_master(name: str, answers: Sequence[dict[str, Master]]) -> Master:
    """Return the master of that name with the highest epoch. Raises redis's ConnectionError if nobody knows it."""
    named = [answer[name] for answer in answers if name in answer]
    if not named:
        known = ", ".join(sorted({each for answer in answers for each in answer})) or "none"
        raise NotConnectedError(f"the sentinels know no master {name!r}; they know: {known}")
    return max(named, key=lambda master: master.epoch)


class MasterConnection(Connection):
    """A connection to whichever Redis is the master when it is made.

    It is made anew once the client has heard of a later master, or when this Redis says that it is a replica now.
    """

    def __init__(self, *, sentinels: Sentinels, **options: Any) -> None:
        super().__init__(**options)
        self._sentinels = sentinels
        self._epoch = -1

    async def connect(self) -> None:
        if self.is_connected and self._epoch != self._sentinels.epoch:
            await self.disconnect()
        await super().connect()  # type: ignore[no-untyped-call]

    async def _connect(self) -> None:
        self.host, self.port, self._epoch = await self._sentinels.find_master()
        await super()._connect()  # type: ignore[no-untyped-call]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ResponseError as error:
            if not isinstance(error, ReadOnlyError) and "READONLY" not in str(error):  # a script's text may have it
                raise
            await self.disconnect()
            raise NotConnectedError(f"READONLY: {self.host}:{self.port} is a replica now") from None


class MasterTlsConnection(MasterConnection, TlsConnection):
    """The same, by TLS: the certificate has to be for the address that the sentinels announce."""
