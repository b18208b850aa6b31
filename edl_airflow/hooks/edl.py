"""The Airflow connection of type `edl`: which backend, which Redis, which secrets; and the hook that looks it up."""

from __future__ import annotations

import asyncio
import hmac
import re
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlencode

import msgspec
from airflow.sdk import BaseHook

from edl_airflow.runtime.spec import BackendRef, KubernetesBackendRef, LocalBackendRef
from edl_runtime.errors import EdlError, SpecError
from edl_runtime.parsing import JsonDecoder
from edl_runtime.pods import Pod
from edl_runtime.settings import KEPT_LOGS, RuntimeSettings
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_url import DEFAULT_PORT, SENTINEL_PORT

if TYPE_CHECKING:
    from airflow.sdk import Connection

DEFAULT_CONN_ID = "edl_default"
REDIS_AT_LEAST = (6, 2)

_DEFAULTS = RuntimeSettings()

_VARIABLE = r"(?!EDL_)[A-Za-z_]\w*\*?"

_HOST = r"[\w.-]+(:\d{1,5})?"
_HOSTS = rf"{_HOST}(,{_HOST})*"

_YES = frozenset({"true", "1", "yes", "on"})

CONN_TYPE = "edl"

EXTRA_FIELDS = frozenset(
    {
        *("backend", "tls", "sentinel_master", "sentinel_password", "namespace", "work_dir", "kubernetes_conn_id"),
        *("kubernetes_namespace", "kubernetes_kept_logs", "redis_for_pods", "pod", "pass_on"),
    }
)
"""What a connection's `extra` may have; `provider.yaml` describes each."""


class EdlHook(BaseHook):
    """Looks up an `edl` connection, for `edl_airflow.client.open_client`.

    Raises SpecError for an incomplete connection, and Airflow's AirflowNotFoundException for one that does not exist.

    :param edl_conn_id: the Airflow connection of type `edl`
    """

    conn_name_attr = "edl_conn_id"
    default_conn_name = DEFAULT_CONN_ID
    conn_type = CONN_TYPE
    hook_name = "Elastic Deep Learning"

    def __init__(self, edl_conn_id: str = DEFAULT_CONN_ID) -> None:
        super().__init__()
        self.edl_conn_id = edl_conn_id

    def edl_connection(self) -> EdlConnection:
        """Look the connection up. Blocks, so never call it in an event loop."""
        connection = self.get_connection(self.edl_conn_id)
        return EdlConnection.of(connection, connection.extra_dejson)

    async def aedl_connection(self) -> EdlConnection:
        """Look the connection up from an event loop."""
        if lacks_async_channel():
            return await asyncio.to_thread(self.edl_connection)
        connection = await self.aget_connection(self.edl_conn_id)
        aextra = getattr(connection, "aextra_dejson", None)  # the API server's connections have none
        return EdlConnection.of(connection, await aextra() if aextra else connection.extra_dejson)

    def test_connection(self) -> tuple[bool, str]:
        """Return whether Redis answers and is new enough and the backend works, and a message.

        A Redis that evicts keys when it is full passes with a warning.
        """
        try:
            edl_connection = self.edl_connection()
            backend = _check_backend(edl_connection.place)
            version, warning = asyncio.run(_ask_redis(edl_connection))
        except (EdlError, OSError) as error:
            return False, str(error)
        if version_numbers(version) < REDIS_AT_LEAST:
            return False, f"Redis is {version}, required is {'.'.join(map(str, REDIS_AT_LEAST))} or newer"
        good = f"Redis {version} answers, and {backend}"
        return True, f"{good}. Warning: {warning}" if warning else good


def lacks_async_channel() -> bool:
    """Whether Airflow can be asked only by blocking calls, and by one thread at a time, as under `dag.test()`.

    That runs a trigger in its own process, where the stand-in for the supervisor has no `asend`; Airflow then reports
    an existing connection as missing, and nothing public says so.
    """
    from airflow.sdk.execution_time import task_runner

    comms = getattr(task_runner, "SUPERVISOR_COMMS", None)
    return comms is not None and not hasattr(comms, "asend")


def _check_backend(place: BackendRef) -> str:
    """Return a message about the backend. Raises OSError, EdlError."""
    if isinstance(place, LocalBackendRef):
        _check_folder(Path(place.work_dir))
        return f"{place.work_dir} can be written to"
    from edl_airflow.backends import backend_for

    jobs = asyncio.run(backend_for(place).list())
    return f"namespace {place.namespace!r} has {len(jobs)} jobs and pools"


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a server's version begins with, as in "7.2.4-rc1"; empty if it begins otherwise."""
    begin = re.match(r"\d+(\.\d+)*", version, re.ASCII)
    return tuple(map(int, begin[0].split("."))) if begin else ()


async def _ask_redis(edl_connection: EdlConnection) -> tuple[str, str]:
    """Return Redis's version, and a warning if it may evict keys."""
    from redis.exceptions import RedisError

    from edl_runtime.store import redis_client
    from edl_runtime.store.redis_client import connect
    from edl_runtime.store.redis_url import address_of

    client = connect(edl_connection.redis_url)
    try:
        with redis_client.unavailable_if_lost(client):
            info: dict[str, Any] = await client.info("server")
        warning = await redis_client.eviction_warning(client)
    except RedisError as error:
        raise RegistryUnavailableError(address_of(edl_connection.redis_url), str(error)) from error
    finally:
        await client.aclose()
    return str(info["redis_version"]), warning


def _check_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryFile(dir=folder):
        pass


class EdlConnection(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an `edl` connection. `redis_url` has the password in it: never log, store or serialise this.

    - `pass_on`: environment variables that instances get, too; a "*" at the end stands for any ending.
    - `redis_url_inside`: the address of the same Redis inside the cluster; empty if it is the same address. Both name
      sentinels where the connection names their master.
    - `teacher_token`: students authenticate to teachers by it; empty on the local backend, which serves loopback only.
    """

    redis_url: str
    namespace: str
    place: BackendRef
    pass_on: tuple[str, ...] = ()
    redis_url_inside: str = ""
    teacher_token: str = ""

    def __repr__(self) -> str:
        return f"EdlConnection(namespace={self.namespace!r}, place={self.place!r})"

    @classmethod
    def of(cls, connection: Connection, extra: Mapping[str, Any]) -> Self:
        """Read an Airflow connection and its extra fields. Raises SpecError, which names the field."""
        fields = _Fields(f"connection {connection.conn_id!r}", extra)
        if connection.conn_type != CONN_TYPE:
            raise SpecError(f"{fields.where}, type", connection.conn_type, repr(CONN_TYPE))
        if unknown := extra.keys() - EXTRA_FIELDS:
            raise SpecError(f"{fields.where}, extra", ", ".join(sorted(unknown)), ", ".join(sorted(EXTRA_FIELDS)))
        backend = fields.check("Backend", "backend", "local|kubernetes", "'local' or 'kubernetes'", "local")
        redis = _RedisPlace.of(connection, fields)
        namespace = fields.check(
            "Namespace", "namespace", r"[A-Za-z0-9._-]+", "letters, digits and . _ - alone", _DEFAULTS.namespace
        )
        allowed = "names of variables, as in 'AWS_PROFILE, AWS_ACCESS_*', and none that begins with EDL_"
        pass_on = fields.check("Variables to pass on", "pass_on", rf"(?a:{_VARIABLE}([\s,]+{_VARIABLE})*)", allowed, "")
        known = cls(
            redis_url=redis.url(),
            namespace=namespace,
            place=_local_place(fields) if backend == "local" else _kubernetes_place(fields),
            pass_on=tuple(pass_on.replace(",", " ").split()),
        )
        if backend == "local":
            return known
        if not connection.password:
            allowed = "the password of Redis: pods reach it, and each other, over a network"
            raise SpecError(f"{fields.where}, field 'Redis password'", "", allowed)
        return msgspec.structs.replace(
            known,
            redis_url_inside=redis.url(redis.inside(fields)),
            teacher_token=_teacher_token(connection.password, namespace),
        )

    def secrets(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables for instances that are never written to disk: Redis's URL, and `pass_on`."""
        passed = {
            name: value for name, value in environ.items() if any(fnmatchcase(name, each) for each in self.pass_on)
        }
        token = {"EDL_TEACHER_TOKEN": self.teacher_token} if self.teacher_token else {}
        return {**passed, **token, "EDL_REDIS_URL": self.redis_url_inside or self.redis_url}


class _Fields(msgspec.Struct, frozen=True):
    where: str
    extra: Mapping[str, Any]

    def check(self, label: str, key: str, pattern: str, allowed: str, default: str) -> str:
        """Return the field's text, `default` if it is empty."""
        given = self.extra.get(key)
        if given in (None, ""):
            return default
        if not isinstance(given, str) or not re.fullmatch(pattern, given):
            raise SpecError(f"{self.where}, field {label!r}", given, allowed)
        return given


def _local_place(fields: _Fields) -> LocalBackendRef:
    allowed = "a path that starts with / or ~"
    work_dir = fields.check("Working folder", "work_dir", "[/~].*", allowed, _DEFAULTS.work_dir)
    return LocalBackendRef(str(Path(work_dir).expanduser()))


def _kubernetes_place(fields: _Fields) -> KubernetesBackendRef:
    allowed = "the name of a namespace in the cluster"
    dns_label = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
    namespace = fields.check("Kubernetes namespace", "kubernetes_namespace", dns_label, allowed, "default")
    allowed = "the id of an Airflow connection of type 'kubernetes'"
    conn_id = fields.check("Kubernetes connection", "kubernetes_conn_id", r"[\w.-]+", allowed, "")
    return KubernetesBackendRef(namespace=namespace, conn_id=conn_id, pod=_pod(fields), kept_logs=_kept_logs(fields))


def _kept_logs(fields: _Fields) -> int:
    given = fields.extra.get("kubernetes_kept_logs")
    if given in (None, ""):
        return KEPT_LOGS
    if isinstance(given, bool) or not re.fullmatch(r"\d{1,4}", str(given), re.ASCII):
        raise SpecError(f"{fields.where}, field 'Kept logs'", given, "0 to 9999 jobs, 0 for none")
    return int(str(given))


def _pod(fields: _Fields) -> Pod:
    given = fields.extra.get("pod") or {}
    field = f"{fields.where}, field 'Pod'"
    allowed = 'JSON of what `Pod` has, as in {"image": "registry.example/edl-runtime:gpu"}'
    try:
        return JsonDecoder(Pod).decode(given) if isinstance(given, str) else msgspec.convert(given, Pod)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, SpecError):
            raise SpecError(
                f"{field}: {error.__cause__.field}", error.__cause__.given, error.__cause__.allowed
            ) from None
        raise SpecError(field, str(error), allowed) from None
    except msgspec.DecodeError as error:
        raise SpecError(field, str(error), allowed) from None


def _teacher_token(password: str, namespace: str) -> str:
    """Derive a token from Redis's password, one way, so that all who know the password get the same."""
    return hmac.new(password.encode(), f"edl teachers of {namespace}".encode(), "sha256").hexdigest()


class _RedisPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where Redis is, and the login.

    - `hosts`: "host:port", or several with commas: of sentinels, if there is a `master`, which they know by that name.
    - `options`: of the URL, the password of the sentinels among them.
    """

    hosts: str
    port: int
    login: str
    tls: bool
    master: str
    options: str

    @classmethod
    def of(cls, connection: Connection, fields: _Fields) -> Self:
        """Read the fields that name Redis. Raises SpecError."""
        allowed = "the name that the sentinels know the master by, as in mymaster"
        master = fields.check("Sentinel master", "sentinel_master", r"[\w.-]+", allowed, "")
        host, allowed = connection.host or "", "the name or address of a Redis 6.2 or newer, as in 127.0.0.1"
        if master:
            allowed = "the sentinels, as in sentinel-0:26379,sentinel-1:26379"
        if not re.fullmatch(_HOSTS if master else r"[\w.-]+|[\da-fA-F:.]+(%\w+)?", host):
            shown = host.rpartition("@")[2]  # a password may precede it
            raise SpecError(f"{fields.where}, field 'Redis host'", shown, allowed)
        port = connection.port or (SENTINEL_PORT if master else DEFAULT_PORT)
        if not 0 < port < 1 << 16:
            raise SpecError(f"{fields.where}, field 'Redis port'", port, "1 to 65535")
        login, password = quote(connection.login or "", safe=""), quote(connection.password or "", safe="")
        sentinels_own = fields.check("Sentinel password", "sentinel_password", ".*", "a text", "") if master else ""
        return cls(
            hosts=f"[{host}]" if not master and ":" in host else host,
            port=port,
            login=f"{login}:{password}@" if login or password else "",
            tls=str(fields.extra.get("tls") or "").lower() in _YES,
            master=master,
            options=f"?{urlencode({'sentinel_password': sentinels_own})}" if sentinels_own else "",
        )

    def inside(self, fields: _Fields) -> str:
        """Return the hosts for pods; empty for the same. Raises SpecError."""
        allowed = "a host, or host:port, as in edl-redis.ml.svc:6379"
        pattern = _HOSTS if self.master else _HOST
        return fields.check("Redis for pods", "redis_for_pods", pattern, allowed, "")

    def url(self, hosts: str = "") -> str:
        """Return the URL with the login, for these hosts or its own; `port` is that of hosts without one."""
        each = [
            host if re.search(r":\d+$", host) else f"{host}:{self.port}" for host in (hosts or self.hosts).split(",")
        ]
        scheme = f"redis{'s' if self.tls else ''}{'+sentinel' if self.master else ''}"
        path = f"{self.master}/0" if self.master else "0"
        return f"{scheme}://{self.login}{','.join(each)}/{path}{self.options}"
