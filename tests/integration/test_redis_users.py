"""Redis users of namespaces: what they reach, how long their passwords last, and where there can be none."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError
from support.airflow.fakes import job_status
from support.backends.jobs import eventually
from support.elastic.agent_group import running_group

from edl_runtime.backends.interface import JobStatus
from edl_runtime.controller.controller import JobDefaults
from edl_runtime.controller.redis_access import RedisAccess
from edl_runtime.controller.run import ControllerOptions, run_controller
from edl_runtime.errors import SpecError
from edl_runtime.registry.directory import Directory
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.errors import RegistryAccessError
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer
from edl_runtime.store.users import PERIOD_S, NamespaceUser, access_rules, check_users, set_user

NOW = 2_900 * PERIOD_S + 100_000.0


@pytest.fixture
async def admin(own_redis: RedisServer) -> AsyncIterator[Redis]:
    """A client of a Redis of the test's own, that may do everything."""
    async with connect(own_redis.url) as client:
        yield client


async def url_of(own_redis: RedisServer, namespace: str) -> str:
    """Make the namespace's user, and return a URL with its login."""
    user = NamespaceUser.of(namespace, own_redis.url)
    async with connect(own_redis.url) as admin:
        await set_user(admin, user, user.passwords((), NOW))
    return user.url(own_redis.url, NOW)


async def can_log_in(url: str) -> bool:
    """Whether Redis takes the login of this URL."""
    try:
        async with connect(url) as client:
            await Directory(client, "ml").pools()
    except RegistryAccessError:
        return False
    return True


@pytest.mark.slow
def test_a_training_needs_no_more_than_its_namespace(own_redis: RedisServer, tmp_path: Path) -> None:
    """Its agents and trainers lease shards, tell each other news, report, and keep checkpoints."""
    url = asyncio.run(url_of(own_redis, "ml"))
    settings = RuntimeSettings(
        redis_url=url, namespace="ml", job="job", lease_ttl_s=30.0, checkpoint=str(tmp_path / "kept")
    )
    with running_group(tmp_path / "out", settings, instances="2", shards=4, epochs=1) as group:
        group.start(0, 1)
        assert group.statuses() == {0: 0, 1: 0}, group.history()
        assert "forbidden" not in group.log(0)
        assert "saved" in {event.kind for event in group.events()}


@pytest.mark.parametrize(
    "command",
    [
        "GET edl:{ml-prod}:pools",
        "GET edl:{ml-prod/job}:progress",
        "GET edl:{mlx/job}:progress",
        "SET anything 1",
        "SUBSCRIBE edl:{ml-prod/job}:group:news",
        "PUBLISH edl:{other/job}:group:calls lost",
        "PSUBSCRIBE *",
        "EVAL return(redis.call('GET','edl:{other}:pools')) 0",
        "SCAN 0",
        "RANDOMKEY",
        "KEYS *",
        "CONFIG GET *",
        "ACL LIST",
        "FLUSHALL",
        "SCRIPT FLUSH",
        "CLIENT LIST",
        "MONITOR",
    ],
)
async def test_others_are_out_of_reach(own_redis: RedisServer, command: str) -> None:
    """Of namespaces whose names begin alike, too."""
    async with connect(await url_of(own_redis, "ml")) as client:
        assert await client.execute_command("GET", "edl:{ml/job}:progress") is None
        with pytest.raises(Exception, match=r"(?i)no permissions|ACL failure|NOPERM") as caught:
            await client.execute_command(*command.split(" "))
        assert isinstance(caught.value, NoPermissionError) or "EVAL" in command


class Jobs:
    """A backend with these jobs."""

    def __init__(self, *jobs: JobStatus) -> None:
        self.jobs = list(jobs)

    async def list(self) -> list[JobStatus]:
        return self.jobs


async def test_a_password_lasts_as_long_as_the_oldest_job_of_its_time(
    own_redis: RedisServer, admin: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New jobs get another one each week. Ended jobs don't count."""
    times = [NOW]
    monkeypatch.setattr(time, "time", lambda: times[-1])
    jobs = Jobs(job_status("ended", phase="succeeded", created_at=NOW - 9 * PERIOD_S))
    user = NamespaceUser.of("ml", own_redis.url)
    access = RedisAccess(admin, user, own_redis.url, jobs)
    first = await access.grant()
    assert await can_log_in(first)
    assert not await can_log_in(user.url(own_redis.url, NOW - 9 * PERIOD_S))
    jobs.jobs.append(job_status("runs", created_at=NOW))

    times.append(NOW + 2 * PERIOD_S)
    later = await access.grant()
    assert later != first
    assert await can_log_in(first)
    assert await can_log_in(later)

    jobs.jobs[-1] = job_status("runs", phase="succeeded", created_at=NOW)
    await access.grant()
    assert not await can_log_in(first)
    assert await can_log_in(later)


async def test_a_redis_that_forgot_its_users_gets_them_again(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis keeps them in its memory only, unless it has a file for them."""
    monkeypatch.setattr("edl_runtime.controller.redis_access.EVERY_S", 0.05)
    async with connect(own_redis.url) as client:
        access = RedisAccess(client, NamespaceUser.of("ml", own_redis.url), own_redis.url, Jobs())
        url = await access.grant()
        own_redis.kill()
        own_redis.start()
        assert not await can_log_in(url)
        running = asyncio.create_task(access.run())
        await eventually(lambda: can_log_in(url), "a user of the Redis that has started again")
        running.cancel()


async def test_where_no_users_can_be_made_it_is_said(own_redis: RedisServer, admin: Redis) -> None:
    """A user that may not, and a Redis whose URL has no password, are named before anything is served."""
    user = NamespaceUser.of("ml", own_redis.url)
    await check_users(admin, user)
    async with connect(await url_of(own_redis, "ml")) as client:
        with pytest.raises(SpecError, match=r"ACL SETUSER, but: .*permissions"):
            await check_users(client, user)
    with pytest.raises(SpecError, match=r"EDL_REDIS_URL: got 'h:6379'.*a URL with a password"):
        NamespaceUser.of("ml", "redis://h:6379")


class WithoutUsers(RedisServer):
    """A Redis that has no ACL, as some that are rented."""

    def _configuration(self, port: int) -> str:
        return super()._configuration(port) + 'rename-command ACL ""\n'


async def test_a_controller_of_all_namespaces_does_not_start_without_users(tmp_path: Path) -> None:
    """It says why before it asks Kubernetes for anything; one of a single namespace needs no users."""
    asked: list[str] = []

    @asynccontextmanager
    async def connect_api() -> AsyncIterator[Any]:
        asked.append("a connection")
        raise ConnectionError
        yield

    with WithoutUsers(tmp_path) as redis:
        defaults = JobDefaults(settings=RuntimeSettings(redis_url=redis.url), redis_url=redis.url)
        options = ControllerOptions(namespace="ml", defaults=defaults, all_namespaces=True)
        with pytest.raises(SpecError, match=r"ACL SETUSER, but: unknown command"):
            await run_controller(connect_api, options)
        assert asked == []
        with pytest.raises(ConnectionError):
            await run_controller(connect_api, msgspec.structs.replace(options, all_namespaces=False))


def test_the_page_names_the_patterns_of_a_namespace() -> None:
    """Those that its jobs need, and no shorter ones, except as what not to do."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "production.md").read_text()
    named = {one.replace("NAMESPACE", "ml") for one in re.findall(r"`([~&]edl:[^`]*)`", page)}
    assert named - {"~edl:{ml*"} == {rule for rule in access_rules("ml") if rule.startswith(("~", "&"))}


def test_its_key_is_not_shown() -> None:
    """Not in a log or a traceback."""
    assert "sesame" not in repr(NamespaceUser.of("ml", "redis://:sesame@h"))
