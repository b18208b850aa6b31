"""The connection "edl": where instances run and which Redis knows who is alive."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import msgspec
from airflow.sdk import BaseHook

from edl_runtime.errors import EdlError, RegistryUnavailableError, SpecError
from edl_runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from edl_runtime.backends.base import Backend
    from edl_runtime.progress import Progress
    from edl_runtime.registry.members import Member
    from edl_runtime.store.keys import Role

DEFAULT_CONN_ID = "edl_default"
REDIS_AT_LEAST = (6, 2)
_DEFAULTS = RuntimeSettings()
_YES = frozenset({"true", "1", "yes", "on"})


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What an `edl` connection says. `redis_url` holds the password: this is never logged, kept or serialised."""

    redis_url: str
    namespace: str
    work_dir: str

    @classmethod
    def of(cls, connection: Connection, extra: Mapping[str, Any]) -> Self:
        """Read an Airflow connection and its extra fields. Raises SpecError that names the field to fill or mend."""
        where = f"connection {connection.conn_id!r}"
        if connection.conn_type != EdlHook.conn_type:
            raise SpecError(f"{where}, type", connection.conn_type, repr(EdlHook.conn_type))
        backend = extra.get("backend") or "local"
        if backend != "local":
            raise SpecError(f"{where}, field 'Backend'", backend, "'local'")
        if not connection.host:
            raise SpecError(
                f"{where}, field 'Redis host'", connection.host or "", "the address of a Redis 6.2 or newer"
            )
        return cls(
            redis_url=_redis_url(connection, tls=str(extra.get("tls") or "").lower() in _YES),
            namespace=extra.get("namespace") or _DEFAULTS.namespace,
            work_dir=str(Path(extra.get("work_dir") or _DEFAULTS.work_dir).expanduser()),
        )


class EdlHook(BaseHook):
    """Looks an `edl` connection up. `open_site` then opens what it leads to.

    Raises SpecError for a connection that lacks something, and Airflow's AirflowNotFoundException for one that does
    not exist.

    :param edl_conn_id: the Airflow connection of type `edl`
    """

    conn_name_attr = "edl_conn_id"
    default_conn_name = DEFAULT_CONN_ID
    conn_type = "edl"
    hook_name = "Elastic Deep Learning"

    def __init__(self, edl_conn_id: str = DEFAULT_CONN_ID) -> None:
        super().__init__()
        self.edl_conn_id = edl_conn_id

    def surroundings(self) -> Surroundings:
        """Look the connection up; never in an event loop, which it blocks."""
        connection = self.get_connection(self.edl_conn_id)
        return Surroundings.of(connection, connection.extra_dejson)

    async def asurroundings(self) -> Surroundings:
        """Look the connection up from an event loop."""
        connection = await self.aget_connection(self.edl_conn_id)
        aextra = getattr(connection, "aextra_dejson", None)  # the API server's connections have none
        return Surroundings.of(connection, await aextra() if aextra else connection.extra_dejson)

    def test_connection(self) -> tuple[bool, str]:
        """Whether Redis answers and is new enough, and the work folder can be written to; and what is wrong if not."""
        try:
            surroundings = self.surroundings()
            _check_folder(Path(surroundings.work_dir))
            version = asyncio.run(_redis_version(surroundings))
        except (EdlError, OSError) as error:
            return False, str(error)
        if version < REDIS_AT_LEAST:
            return (
                False,
                f"Redis is {'.'.join(map(str, version))}, needed is {'.'.join(map(str, REDIS_AT_LEAST))} or newer",
            )
        return True, f"Redis {'.'.join(map(str, version))} answers, and {surroundings.work_dir} can be written to"


@asynccontextmanager
async def open_site(surroundings: Surroundings) -> AsyncIterator[Site]:
    """Open what a connection leads to, and close its sockets on exit.

    Nothing is sent to Redis yet, so work that needs only the backend goes on while Redis is away.
    """
    site = await asyncio.to_thread(Site, surroundings)  # imports Redis's client, which takes a second
    try:
        yield site
    finally:
        await site.close()


class Site:
    """Where instances run (`backend`), what they may know (`secrets`) and who is alive. Made by `open_site`."""

    def __init__(self, surroundings: Surroundings) -> None:
        from edl_runtime import progress
        from edl_runtime.backends.local import LocalBackend
        from edl_runtime.registry.directory import Directory
        from edl_runtime.store.client import connect

        self.namespace = surroundings.namespace
        self.secrets = {"EDL_REDIS_URL": surroundings.redis_url}
        self.backend: Backend = LocalBackend(surroundings.work_dir)
        self._client = connect(surroundings.redis_url)
        self._directory = Directory(self._client, surroundings.namespace)
        self._read_progress = progress.read

    async def close(self) -> None:
        """Close the sockets."""
        await self._client.aclose()

    async def teachers(self, pool: str) -> list[str]:
        """Return the addresses of the registered teachers, sorted. Raises RegistryUnavailableError."""
        return sorted(member.address for member in await self.members(pool, "teachers"))

    async def members(self, pool: str, role: Role) -> list[Member]:
        """Return the registered teachers or students, by id. Raises RegistryUnavailableError."""
        return await self._directory.members(pool, role)

    async def progress(self, job: str) -> Progress | None:
        """Return the job's last report. Raises RegistryUnavailableError."""
        return await self._read_progress(self._client, self.namespace, job)


def _redis_url(connection: Connection, *, tls: bool) -> str:
    login = quote(connection.login or "", safe="")
    password = quote(connection.password or "", safe="")
    user = f"{login}:{password}@" if login or password else ""
    host = f"[{connection.host}]" if ":" in (connection.host or "") else connection.host
    return f"{'rediss' if tls else 'redis'}://{user}{host}:{connection.port or 6379}/0"


async def _redis_version(surroundings: Surroundings) -> tuple[int, ...]:
    from redis.exceptions import RedisError

    from edl_runtime.store.client import address_of, connect

    client = connect(surroundings.redis_url)
    try:
        info: dict[str, Any] = await client.info("server")
    except (RedisError, OSError) as error:
        raise RegistryUnavailableError(address_of(surroundings.redis_url), str(error)) from error
    finally:
        await client.aclose()
    return tuple(int(part) for part in str(info["redis_version"]).split(".")[:3])


def _check_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
