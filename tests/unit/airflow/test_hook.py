"""The connection "edl"."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import urlsplit

import pytest
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.sdk.execution_time.comms import ConnectionResult, GetConnection
from airflow.sdk.execution_time.supervisor import InProcessSupervisorComms
from redis import Redis

from edl_airflow.hooks.edl import EdlConnection, EdlHook
from edl_airflow.runtime.spec import KubernetesBackendRef, LocalBackendRef
from edl_runtime.errors import SpecError
from edl_runtime.pods import Pod
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_server import RedisServer


def _surroundings(extra: dict[str, Any] | None = None, **given: Any) -> EdlConnection:
    connection = Connection(conn_id="c", **{"conn_type": "edl", "host": "redis.example", **given})
    return EdlConnection.of(connection, extra or {})


def test_a_host_is_enough() -> None:
    """Everything else has a default."""
    assert _surroundings() == EdlConnection(
        redis_url="redis://redis.example:6379/0",
        namespace="default",
        place=LocalBackendRef(str(Path("~/.edl").expanduser())),
    )


def test_every_field_counts() -> None:
    """Passwords may hold any letter."""
    given = _surroundings(
        {"tls": True, "namespace": "team", "work_dir": "/w", "backend": "local"}, port=7, login="me", password="p@:/ß"
    )
    url = urlsplit(given.redis_url)
    assert (url.scheme, url.hostname, url.port, url.username) == ("rediss", "redis.example", 7, "me")
    assert url.password == "p%40%3A%2F%C3%9F"
    assert (given.namespace, given.place) == ("team", LocalBackendRef("/w"))


ON_KUBERNETES: list[tuple[dict[str, Any], str]] = [
    ({"kubernetes_namespace": "A b"}, "Kubernetes namespace"),
    ({"kubernetes_kept_logs": -1}, "Kept logs"),
    ({"kubernetes_kept_logs": True}, "Kept logs"),
    ({"kubernetes_kept_logs": "some"}, "Kept logs"),
    ({"kubernetes_conn_id": "a b"}, "Kubernetes connection"),
    ({"redis_for_pods": "redis://x"}, "Redis for pods"),
    ({"pod": "{"}, "Pod"),
    ({"pod": "[]"}, "Pod"),
    ({"pod": {"image": 7}}, "Pod"),
    ({"pod": {"resources": {"gpus": 1}}}, "Pod.*pod.resources"),
]


@pytest.mark.parametrize(
    ("mistake", "field"),
    [
        ({"host": ""}, "Redis host"),
        ({"host": None}, "Redis host"),
        ({"conn_type": "redis"}, "type"),
        ({"host": "redis://:top-secret@127.0.0.1"}, "Redis host"),
        ({"host": "127.0.0.1/0"}, "Redis host"),
        ({"host": "a b"}, "Redis host"),
        ({"port": 70000}, "Redis port"),
        ({"port": -1}, "Redis port"),
        ({"password": "", "extra": {"backend": "kubernetes"}}, "Redis password"),
        ({"extra": {"backend": "mars"}}, "Backend"),
        ({"extra": {"work_dir": 5}}, "Working folder"),
        ({"extra": {"work_dir": "relative/one"}}, "Working folder"),
        ({"extra": {"namespace": "a b}"}}, "Namespace"),
        ({"extra": {"namespace": 7}}, "Namespace"),
        ({"extra": {"redis_tls": True}}, "extra.*redis_tls.*, tls"),
        *(
            ({"extra": {"pass_on": expected}}, "Variables to pass on")
            for expected in ("*", "AWS_PROFILE; HOME", "HOME, EDL_JOB", "AWS_SECRET_ACCESS_KEY=x")
        ),
        *(({"extra": {"backend": "kubernetes", **extra}}, field) for extra, field in ON_KUBERNETES),
    ],
)
def test_a_mistake_names_the_field_to_fill(mistake: dict[str, Any], field: str) -> None:
    """And the connection that has it, and shows no password, which is no part of its repr either."""
    with pytest.raises(SpecError, match=f"connection 'c'.*{field}") as caught:
        _surroundings(**{"password": "top-secret", **mistake})
    assert "top-secret" not in str(caught.value) + repr(_surroundings(password="top-secret"))


def test_instances_see_the_variables_that_are_to_be_passed_on() -> None:
    """With the values of wherever the work is done. Where Redis is says the connection and nobody else."""
    given = _surroundings({"pass_on": "AWS_*, HF_TOKEN\nNOT_SET"})
    environ = {"AWS_PROFILE": "p", "AWS_SECRET_ACCESS_KEY": "s", "MY_AWS_KEY": "m", "HF_TOKEN": "h", "HF_TOKEN_2": "i"}
    assert given.secrets({**environ, "EDL_REDIS_URL": "redis://elsewhere"}) == {
        "AWS_PROFILE": "p",
        "AWS_SECRET_ACCESS_KEY": "s",
        "HF_TOKEN": "h",
        "EDL_REDIS_URL": "redis://redis.example:6379/0",
    }
    assert _surroundings().secrets(environ) == {"EDL_REDIS_URL": "redis://redis.example:6379/0"}


def _cluster(extra: dict[str, Any] | None = None, **given: Any) -> EdlConnection:
    return _surroundings({"backend": "kubernetes", **(extra or {})}, **{"password": "top-secret", **given})


@pytest.mark.parametrize(
    "pod",
    [
        '{"image": "edl:1", "resources": {"gpu": 1}, "queue": "team"}',
        {"image": "edl:1", "resources": {"gpu": 1}, "queue": "team"},
    ],
)
def test_a_cluster_is_a_namespace_and_what_pods_have_in_common(pod: Any) -> None:
    """By a connection of Airflow's own provider; the pod's fields are JSON, as text or as such."""
    given = _cluster({"kubernetes_conn_id": "gpus", "kubernetes_namespace": "ml", "pod": pod})
    assert given.place == KubernetesBackendRef(
        namespace="ml", conn_id="gpus", pod=Pod(image="edl:1", resources={"gpu": 1}, queue="team")
    )
    assert _cluster().place == KubernetesBackendRef(namespace="default")


@pytest.mark.parametrize(("given", "kept"), [(None, 20), ("", 20), (0, 0), ("0", 0), (5, 5)])
def test_a_connection_says_of_how_many_jobs_logs_are_kept(given: object, kept: int) -> None:
    place = _cluster({"kubernetes_kept_logs": given}).place
    assert isinstance(place, KubernetesBackendRef)
    assert place.kept_logs == kept


def test_pods_reach_redis_by_a_name_of_their_own() -> None:
    """Where they need one; the password is the same."""
    assert _cluster().secrets({})["EDL_REDIS_URL"] == _cluster().redis_url
    inside = _cluster({"redis_for_pods": "edl-redis.ml.svc:6380"})
    assert inside.redis_url == "redis://:top-secret@redis.example:6379/0"
    assert inside.secrets({})["EDL_REDIS_URL"] == "redis://:top-secret@edl-redis.ml.svc:6380/0"
    assert urlsplit(_cluster({"redis_for_pods": "edl-redis"}).secrets({})["EDL_REDIS_URL"]).port == 6379


def test_sentinels_name_the_master_for_tasks_and_pods() -> None:
    """By a master's name; a sentinel without a port has the connection's, or Sentinel's usual one."""
    extra = {"sentinel_master": "main", "sentinel_password": "a&b", "tls": True}
    outside = _cluster(extra, host="one:7000,two", port=None)
    assert outside.redis_url == "rediss+sentinel://:top-secret@one:7000,two:26379/main/0?sentinel_password=a%26b"
    inside = _cluster({"sentinel_master": "main", "redis_for_pods": "three,four:7001"}, port=7002)
    assert inside.secrets({})["EDL_REDIS_URL"] == "redis+sentinel://:top-secret@three:7002,four:7001/main/0"
    with pytest.raises(SpecError, match=r"Redis host.*sentinel-0:26379,sentinel-1:26379"):
        _cluster(extra, host="one,,two")


def test_students_and_teachers_in_pods_have_a_token_in_common() -> None:
    """The same for all who have the connection, another for each namespace, and nothing of the password is in it."""
    token = _cluster().secrets({})["EDL_TEACHER_TOKEN"]
    assert token == _cluster(host="elsewhere").secrets({})["EDL_TEACHER_TOKEN"]
    assert token != _cluster({"namespace": "team"}).secrets({})["EDL_TEACHER_TOKEN"]
    assert token != _cluster(password="other").secrets({})["EDL_TEACHER_TOKEN"]
    assert RuntimeSettings.from_env(_cluster().secrets({})).teacher_token == token
    assert "EDL_TEACHER_TOKEN" not in _surroundings(password="top-secret").secrets({})


@pytest.mark.parametrize("host", ["127.0.0.1", "redis.example", "my_redis-1", "::1", "fe80::1%eth0"])
def test_names_and_addresses_are_hosts(host: str) -> None:
    """With and without colons."""
    assert urlsplit(_surroundings(host=host).redis_url).port == 6379


async def test_it_is_looked_up_from_both_worlds() -> None:
    """A worker blocks for it, a triggerer does not; an unknown one is an error in both."""
    assert EdlHook().edl_connection() == await EdlHook().aedl_connection()
    assert EdlHook().edl_connection().namespace == "team"
    with pytest.raises(AirflowNotFoundException, match="elsewhere"):
        EdlHook("elsewhere").edl_connection()
    with pytest.raises(AirflowNotFoundException, match="elsewhere"):
        await EdlHook("elsewhere").aedl_connection()


async def test_a_trigger_of_dag_test_finds_a_connection_of_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stand-in for Airflow's supervisor answers blocking calls alone."""

    class Supervisor:
        def _handle_request(self, asked: GetConnection, *_: object) -> None:
            others = dict.fromkeys(("schema", "login", "password", "port", "extra"))
            given = {"conn_id": asked.conn_id, "conn_type": "edl", "host": "redis.example", **others}
            comms.messages.append(ConnectionResult.model_validate(given))

    comms = InProcessSupervisorComms(supervisor=Supervisor())  # type: ignore[arg-type]
    monkeypatch.setattr("airflow.sdk.execution_time.task_runner.SUPERVISOR_COMMS", comms, raising=False)
    assert (await EdlHook("of_the_database").aedl_connection()).redis_url == "redis://redis.example:6379/0"


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], tuple[bool, str]]:
    """Test a connection to this Redis and folder."""

    def test(redis_url: str, work_dir: Path) -> tuple[bool, str]:
        url = urlsplit(redis_url)
        given: dict[str, Any] = {"conn_type": "edl", "host": url.hostname, "port": url.port, "password": url.password}
        given |= {"login": url.username or None, "extra": {"work_dir": str(work_dir)}}
        monkeypatch.setenv("AIRFLOW_CONN_EDL_DEFAULT", json.dumps(given))
        return EdlHook().test_connection()

    return test


def test_a_good_connection_passes_the_test(connect: Any, redis_url: str, work_dir: Path) -> None:
    """Redis answers and is new enough, and the work folder can be written to."""
    passed, message = connect(redis_url, work_dir)
    assert passed, message
    assert stat.S_IMODE(work_dir.stat().st_mode) == 0o700  # made by the test, and the owner's only as by the backend


def test_a_redis_that_evicts_passes_with_a_warning(connect: Any, own_redis: RedisServer, work_dir: Path) -> None:
    """It names the policy, and what is to be set."""
    with Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "volatile-lru")
    passed, message = connect(own_redis.url, work_dir)
    assert passed
    assert "maxmemory-policy volatile-lru" in message
    assert "noeviction" in message


def test_a_bad_one_says_what_is_wrong(connect: Any, redis_url: str, work_dir: Path) -> None:
    """A Redis that is away, a wrong password, a folder that is a file: never the password itself."""
    good = urlsplit(redis_url)
    file = work_dir.parent / "file"
    file.write_text("")
    for url, folder, word in (
        (f"redis://:{good.password}@127.0.0.1:1/0", work_dir, "127.0.0.1:1"),
        (f"redis://:wrong-one@127.0.0.1:{good.port}/0", work_dir, "password"),
        (redis_url, file, str(file)),
    ):
        passed, message = connect(url, folder)
        assert (passed, word in message, "wrong-one" in message) == (False, True, False)
        assert not good.password or good.password not in message


@pytest.mark.parametrize(
    ("version", "passes"),
    [("6.0.16", False), ("df-1.0", False), ("6.2", True), ("7.2.4-rc1", True), ("255.255.255-valkey", True)],
)
def test_a_redis_that_is_too_old_is_named(
    connect: Any, redis_url: str, work_dir: Path, monkeypatch: pytest.MonkeyPatch, version: str, *, passes: bool
) -> None:
    """Streams and scripts need 6.2; a version may have more than numbers, as other servers' have."""
    info = {"redis_version": version}
    monkeypatch.setattr("redis.asyncio.Redis.info", AsyncMock(return_value=info))
    passed, message = connect(redis_url, work_dir)
    assert passed is passes
    assert (
        f"Redis {version} answers" in message if passes else message == f"Redis is {version}, required is 6.2 or newer"
    )
