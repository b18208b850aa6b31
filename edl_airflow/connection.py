"""What an Airflow connection of type `edl` says: which backend, which Redis, which secrets."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import msgspec

from edl_airflow.runtime.spec import BackendRef, KubernetesBackendRef, LocalBackendRef
from edl_runtime.errors import SpecError
from edl_runtime.parsing import JsonDecoder
from edl_runtime.pods import Pod
from edl_runtime.settings import RuntimeSettings

if TYPE_CHECKING:
    from airflow.sdk import Connection


DEFAULT_PORT = 6379

_DEFAULTS = RuntimeSettings()

_HOST = re.compile(r"[\w.-]+|[\da-fA-F:.]+(%\w+)?")

_NAMESPACE = re.compile(r"[A-Za-z0-9._-]+")

_HOST_AND_PORT = re.compile(r"[\w.-]+(:\d{1,5})?")

_BACKEND = re.compile("local|kubernetes")

_CONN_ID = re.compile(r"[\w.-]+")

_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

_FOLDER = re.compile(r"[/~].*")

_VARIABLE = r"(?!EDL_)[A-Za-z_]\w*\*?"

_VARIABLES = re.compile(rf"{_VARIABLE}([\s,]+{_VARIABLE})*", re.ASCII)

_YES = frozenset({"true", "1", "yes", "on"})

CONN_TYPE = "edl"


class EdlConnection(msgspec.Struct, frozen=True, kw_only=True):
    """What an `edl` connection says. `redis_url` holds the password: this is never logged, kept or serialised.

    - `pass_on`: names of environment variables that instances see too, each with a "*" at its end for all that begin
      so.
    - `redis_url_inside`: of the same Redis, as instances reach it; empty if that is no other.
    - `teacher_token`: what students show to teachers; empty where these serve their own machine alone.
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
        """Read an Airflow connection and its extra fields. Raises SpecError that names the field to fill or mend."""
        fields = _Fields(f"connection {connection.conn_id!r}", extra)
        if connection.conn_type != CONN_TYPE:
            raise SpecError(f"{fields.where}, type", connection.conn_type, repr(CONN_TYPE))
        backend = fields.check("Backend", "backend", _BACKEND, "'local' or 'kubernetes'", "local")
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
        tls = str(extra.get("tls") or "").lower() in _YES
        allowed = "names of variables, as in 'AWS_PROFILE, AWS_ACCESS_*', and none that begins with EDL_"
        pass_on = fields.check("Variables to pass on", "pass_on", _VARIABLES, allowed, "")
        known = cls(
            redis_url=_redis_url(connection, host, port, tls=tls),
            namespace=namespace,
            place=_local_place(fields) if backend == "local" else _kubernetes_place(fields),
            pass_on=tuple(pass_on.replace(",", " ").split()),
        )
        if backend == "local":
            return known
        if not connection.password:
            allowed = "the password of Redis: pods reach it, and each other, over a network"
            raise SpecError(f"{fields.where}, field 'Redis password'", "", allowed)
        inside, inside_port = _inside(fields, host, port)
        return msgspec.structs.replace(
            known,
            redis_url_inside=_redis_url(connection, inside, inside_port, tls=tls),
            teacher_token=_teacher_token(connection.password, namespace),
        )

    def secrets(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that instances see and that are never written down: Redis's, and those to pass on."""
        passed = {
            name: value for name, value in environ.items() if any(fnmatchcase(name, each) for each in self.pass_on)
        }
        token = {"EDL_TEACHER_TOKEN": self.teacher_token} if self.teacher_token else {}
        return {**passed, **token, "EDL_REDIS_URL": self.redis_url_inside or self.redis_url}


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


def _local_place(fields: _Fields) -> LocalBackendRef:
    work_dir = fields.check("Working folder", "work_dir", _FOLDER, "a path that starts with / or ~", _DEFAULTS.work_dir)
    return LocalBackendRef(str(Path(work_dir).expanduser()))


def _kubernetes_place(fields: _Fields) -> KubernetesBackendRef:
    allowed = "the name of a namespace in the cluster"
    namespace = fields.check("Kubernetes namespace", "kubernetes_namespace", _DNS_NAME, allowed, "default")
    allowed = "the id of an Airflow connection of type 'kubernetes'"
    conn_id = fields.check("Kubernetes connection", "kubernetes_conn_id", _CONN_ID, allowed, "")
    return KubernetesBackendRef(namespace=namespace, conn_id=conn_id, pod=_pod(fields))


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


def _inside(fields: _Fields, host: str, port: int) -> tuple[str, int]:
    """Return where pods reach Redis."""
    allowed = "a host, or host:port, as in edl-redis.ml.svc:6379"
    given = fields.check("Redis for pods", "redis_for_pods", _HOST_AND_PORT, allowed, "")
    if not given:
        return host, port
    inside, _, inside_port = given.partition(":")
    return inside, int(inside_port or port)


def _teacher_token(password: str, namespace: str) -> str:
    """Return a token that all who know Redis's password come to, and nobody can come back from."""
    return hmac.new(password.encode(), f"edl teachers of {namespace}".encode(), "sha256").hexdigest()


def _redis_url(connection: Connection, host: str, port: int, *, tls: bool) -> str:
    login = quote(connection.login or "", safe="")
    password = quote(connection.password or "", safe="")
    user = f"{login}:{password}@" if login or password else ""
    return f"{'rediss' if tls else 'redis'}://{user}{f'[{host}]' if ':' in host else host}:{port}/0"
