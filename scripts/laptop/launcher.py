"""Runs Redis and Airflow's components on one machine, in one folder."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Any, Self

import httpx
from laptop.client import AirflowClient, ApiError
from laptop.components import Component
from laptop.environment import USER, command_environment, components_environment

from edl_runtime import locks
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.errors import EdlError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_server import RedisServer

COMPONENTS = {
    "api-server": ("api-server",),
    "dag-processor": ("dag-processor",),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}
"""In the order of their start. The API server reads logs from files, so the others do not serve them."""

USUAL_PORT = 8080
START_TIMEOUT_S = 300.0
LOOK_EVERY_S = 0.5
GRACE_S = 5.0
LOCKED_S = 60.0

Say = Callable[[str], None]


@dataclass(eq=False, repr=False)
class LaptopInUseError(EdlError):
    """Raised when another Airflow runs in the folder."""

    home: Path

    def __str__(self) -> str:
        return f"an Airflow runs in {self.home} already; stop it first, by Ctrl-C in its terminal"


class Laptop:
    """A whole Airflow, with Redis and the connection `edl_default`, that listens on loopback only.

    A context manager; entering it takes about a minute on two cores, less in a folder that was used before. On exit, or
    when this process is killed, everything stops, with the jobs that it started.

    - `home`: the folder, which keeps Airflow's database, logs and password. Source its `edl.sh` to use the commands
      `edl` and `airflow` with this Airflow.
    - `dags`: the folder with DAG files.
    - `environ`: the environment to start from.
    - `say`: called with lines of progress.
    - `options`: further options of Airflow, as in {"CORE__PARALLELISM": "8"}.
    - `connections`: further connections of Airflow by id, or another `edl_default`, as in JSON.

    Raises LaptopInUseError, RegistryUnavailableError without a redis-server, ComponentError when a component ends, and
    TimeoutError when they are not up in five minutes.
    """

    def __init__(
        self,
        home: Path,
        *,
        dags: Path,
        environ: Mapping[str, str],
        say: Say,
        options: Mapping[str, str] | None = None,
        connections: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.home = home.absolute()
        self.dags = dags.absolute()
        self.airflow_home = self.home / "airflow"
        self.edl_variables = self.home / "edl.sh"
        self.work_dir = self.home / "jobs"
        self.user = USER
        self.password = ""
        self.url = ""
        self.redis = RedisServer(self.home / "redis")
        self._environ = environ
        self._options = options
        self._connections = connections
        self._say = say
        self._components: list[Component] = []
        self._started_at = datetime.now(UTC)
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.push(self)
            self._start()
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def client(self) -> AirflowClient:
        """Return a client that is logged in; close it."""
        client = AirflowClient(self.url, self.user, self.password)
        client.log_in()
        return client

    def check(self) -> None:
        """Raise ComponentError if a component has ended, RegistryUnavailableError if Redis has."""
        self.redis.check()
        for component in self._components:
            component.check()

    def wait_for_dag(self, client: AirflowClient, dag_id: str) -> None:
        """Wait until Airflow has parsed the DAG's file. Raises TimeoutError, with the import errors."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            self.check()
            dag = client.dag(dag_id)
            if dag and dag["last_parsed_time"] and datetime.fromisoformat(dag["last_parsed_time"]) > self._started_at:
                return
            if time.monotonic() > deadline:
                reasons = client.import_errors() or ["its file is not there, or was not read in time"]
                raise TimeoutError(f"no DAG {dag_id!r} in {self.dags}:\n" + "\n".join(reasons))
            time.sleep(LOOK_EVERY_S)

    def _start(self) -> None:
        self.airflow_home.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = self._lock()
        self.password = self._kept_password()
        self.redis.start()
        self._exit.callback(self.redis.stop)
        self._say(f"Redis listens on 127.0.0.1:{self.redis.port}")
        self._write_edl_variables()
        self._exit.callback(self._delete_jobs)
        port = _free_port(USUAL_PORT)
        self.url = f"http://127.0.0.1:{port}"
        env = components_environment(
            self._environ,
            home=self.airflow_home,
            dags=self.dags,
            port=port,
            redis_url=self.redis.url,
            work_dir=self.work_dir,
            passwords=self._passwords,
            options=self._options,
            connections=self._connections,
        )
        self._exit.callback(self._stop_components)
        self._migrate(env, lock)
        self._started_at = datetime.now(UTC)
        for name, words in COMPONENTS.items():
            self._components.append(self._component(name, words, env, lock))
        self._say(f"Airflow's {', '.join(COMPONENTS)} are starting; their logs are in {self.airflow_home}")
        self._wait_for_api()
        self._say(f"Airflow answers at {self.url}")

    def _write_edl_variables(self) -> None:
        """Write the variables for the commands `edl` and `airflow`, until this Airflow stops.

        Only this user may read the file, because it contains passwords.
        """
        self.edl_variables.unlink(missing_ok=True)
        self._exit.callback(self.edl_variables.unlink, missing_ok=True)
        self.edl_variables.touch(mode=0o600)
        settings = RuntimeSettings(redis_url=self.redis.url, work_dir=str(self.work_dir))
        airflow = command_environment(
            home=self.airflow_home,
            dags=self.dags,
            redis_url=self.redis.url,
            work_dir=self.work_dir,
            connections=self._connections,
        )
        variables = {**settings.to_env(), **airflow}
        self.edl_variables.write_text("".join(f"export {name}={quote(text)}\n" for name, text in variables.items()))

    def _lock(self) -> int:
        lock = locks.take(self.home / "lock")
        if lock is None:
            raise LaptopInUseError(self.home)
        self._exit.callback(os.close, lock)
        self._exit.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        return lock

    @property
    def _passwords(self) -> Path:
        return self.airflow_home / "passwords.json"

    def _kept_password(self) -> str:
        if not self._passwords.exists():
            self._passwords.touch(mode=0o600)
            self._passwords.write_text(json.dumps({USER: secrets.token_urlsafe(12)}))
        return str(json.loads(self._passwords.read_text())[USER])

    def _migrate(self, env: Mapping[str, str], lock: int) -> None:
        """Create or upgrade the database, unless this version of Airflow has done so before."""
        done, current = self.airflow_home / "migrated", version("apache-airflow-core")
        if done.exists() and done.read_text() == current:
            return
        self._say("Making Airflow's database (once for this folder)")
        component = self._component("db migrate", ("db", "migrate"), env, lock)
        self._components.append(component)
        component.finish()
        self._components.remove(component)
        done.write_text(current)

    def _component(self, name: str, words: tuple[str, ...], env: Mapping[str, str], lock: int) -> Component:
        if name != "api-server":
            env = {"AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": self._patient_database, **env}
        log = self.airflow_home / f"{name.replace(' ', '-')}.log"
        return Component(name, [sys.executable, "-m", "airflow", *words], env=env, log=log, lock=lock)

    @property
    def _patient_database(self) -> str:
        """The URL of Airflow's SQLite with a longer timeout for components that end when it is locked.

        The default is five seconds, for which the API server may hold the lock while its event loop waits for it.
        """
        return f"sqlite:///{self.airflow_home}/airflow.db?timeout={LOCKED_S:.0f}"

    def _wait_for_api(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        with AirflowClient(self.url, self.user, self.password) as client:
            while True:
                self.check()
                try:
                    client.log_in()
                except (httpx.TransportError, ApiError) as error:  # another process may have taken the port
                    if time.monotonic() > deadline:
                        waited = f"Airflow's API server is not up after {START_TIMEOUT_S:.0f} s ({error})"
                        raise TimeoutError(f"{waited}; its log is {self.airflow_home}/api-server.log") from error
                else:
                    return
                time.sleep(LOOK_EVERY_S)

    def _stop_components(self) -> None:
        if self._components:
            self._say("Stopping Airflow")
        for component in self._components:
            component.terminate()
        deadline = time.monotonic() + GRACE_S
        for component in self._components:
            component.wait(max(0.0, deadline - time.monotonic()))
        for component in self._components:
            component.cut()
        self._components.clear()

    def _delete_jobs(self) -> None:
        async def delete() -> None:
            backend = LocalBackend(self.work_dir)
            for job in await backend.list():
                await backend.delete(job.name)

        asyncio.run(delete())


def _free_port(preferred: int) -> int:
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("there is no free port on 127.0.0.1")
