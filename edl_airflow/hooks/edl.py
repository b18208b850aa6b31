"""The connection "edl": where instances run and which Redis knows who is alive."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import msgspec
from airflow.sdk import BaseHook

from edl_airflow.work import Place
from edl_runtime.errors import EdlError, RegistryUnavailableError, SpecError
from edl_runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from airflow.sdk import Connection

DEFAULT_CONN_ID = "edl_default"
REDIS_AT_LEAST = (6, 2)
DEFAULT_PORT = 6379
_DEFAULTS = RuntimeSettings()
_HOST = re.compile(r"[\w.-]+|[\da-fA-F:.]+(%\w+)?")
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]+")
_FOLDER = re.compile(r"[/~].*")
_VARIABLE = r"(?!EDL_)[A-Za-z_]\w*\*?"
_VARIABLES = re.compile(rf"{_VARIABLE}([\s,]+{_VARIABLE})*", re.ASCII)
_YES = frozenset({"true", "1", "yes", "on"})


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What an `edl` connection says. `redis_url` holds the password: this is never logged, kept or serialised.

    `pass_on`: names of environment variables that instances see too, each with a "*" at its end for all that begin so.
    """

    redis_url: str
    namespace: str
    place: Place
    pass_on: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Surroundings(namespace={self.namespace!r}, place={self.place!r})"

    @classmethod
    def of(cls, connection: Connection, extra: Mapping[str, Any]) -> Self:
        """Read an Airflow connection and its extra fields. Raises SpecError that names the field to fill or mend."""
        fields = _Fields(f"connection {connection.conn_id!r}", extra)
        if connection.conn_type != EdlHook.conn_type:
            raise SpecError(f"{fields.where}, type", connection.conn_type, repr(EdlHook.conn_type))
        fields.check("Backend", "backend", re.compile("local"), "'local'", "local")
        host, allowed = connection.host or "", "the name or address of a Redis 6.2 or newer, as in 127.0.0.1"
        if not _HOST.fullmatch(host):
            shown = host.rpartition("@")[2]  # before it may stand a password
            raise SpecError(f"{fields.where}, field 'Redis host'", shown, allowed)
        port = connection.port or DEFAULT_PORT
        if not 0 < port < 1 << 16:
            raise SpecError(f"{fields.where}, field 'Redis port'", port, "1 to 65535")
        namespace = fields.check(
            "Namespace", "namespace", _NAMESPACE, "letters, digits and . _ - alone", _DEFAULTS.namespace
        )
        work_dir = fields.check(
            "Working folder", "work_dir", _FOLDER, "a path that starts with / or ~", _DEFAULTS.work_dir
        )
        allowed = "names of variables, as in 'AWS_PROFILE, AWS_ACCESS_*', and none that begins with EDL_"
        pass_on = fields.check("Variables to pass on", "pass_on", _VARIABLES, allowed, "")
        return cls(
            redis_url=_redis_url(connection, host, port, tls=str(extra.get("tls") or "").lower() in _YES),
            namespace=namespace,
            place=Place(str(Path(work_dir).expanduser())),
            pass_on=tuple(pass_on.replace(",", " ").split()),
        )

    def secrets(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that instances see and that are never written down: Redis's, and those to pass on."""
        passed = {
            name: value for name, value in environ.items() if any(fnmatchcase(name, each) for each in self.pass_on)
        }
        return {**passed, "EDL_REDIS_URL": self.redis_url}


class _Fields(msgspec.Struct, frozen=True):
    where: str
    extra: Mapping[str, Any]

    def check(self, label: str, key: str, pattern: re.Pattern[str], allowed: str, default: str) -> str:
        """Return the field's text, `default` if it is empty."""
        given = self.extra.get(key)
        if given in (None, ""):
            return default
        if not isinstance(given, str) or not pattern.fullmatch(given):
            raise SpecError(f"{self.where}, field {label!r}", given, allowed)
        return given


class EdlHook(BaseHook):
    """Looks an `edl` connection up. `edl_airflow.site.open_site` then opens what it leads to.

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
            _check_folder(Path(surroundings.place.work_dir))
            version = asyncio.run(_redis_version(surroundings))
        except (EdlError, OSError) as error:
            return False, str(error)
        if version < REDIS_AT_LEAST:
            return (
                False,
                f"Redis is {'.'.join(map(str, version))}, needed is {'.'.join(map(str, REDIS_AT_LEAST))} or newer",
            )
        return True, f"Redis {'.'.join(map(str, version))} answers, and {surroundings.place.work_dir} can be written to"


def _redis_url(connection: Connection, host: str, port: int, *, tls: bool) -> str:
    login = quote(connection.login or "", safe="")
    password = quote(connection.password or "", safe="")
    user = f"{login}:{password}@" if login or password else ""
    return f"{'rediss' if tls else 'redis'}://{user}{f'[{host}]' if ':' in host else host}:{port}/0"


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
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryFile(dir=folder):
        pass
