"""A master, its replicas and their sentinels: real processes on loopback, by TLS where it is asked for."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from support.network.certificates import CertificateFiles
from support.network.ports import free_ports

from edl_runtime.store.redis_server import RedisServer

MASTER = "edl"
PASSWORD = "of-redis"
SENTINEL_PASSWORD = "of-sentinel"

DOWN_AFTER_MS = 2000
"""For how long a master is silent before its sentinels replace it."""
PATIENCE_S = 150.0
"""A sentinel that has stood still for two seconds does nothing for thirty."""


class Tls(NamedTuple):
    """What servers show, and the authority that has signed it."""

    shown: CertificateFiles
    ca: Path

    def lines(self, port: int) -> list[str]:
        """Return the configuration of a server that speaks TLS alone."""
        files = [f"tls-cert-file {self.shown.cert}", f"tls-key-file {self.shown.key}", f"tls-ca-cert-file {self.ca}"]
        return ["port 0", f"tls-port {port}", "tls-replication yes", "tls-auth-clients no", *files]


class Node(RedisServer):
    """A Redis that keeps nothing on disk, with further lines of configuration."""

    def __init__(self, folder: Path, port: int, lines: list[str], tls: Tls | None = None) -> None:
        super().__init__(folder, port=port, password=PASSWORD)
        self.lines = [*lines, *(tls.lines(port) if tls else [])]
        self._tls = tls

    def _configuration(self, port: int) -> str:
        own = [f"masterauth {PASSWORD}", "repl-diskless-sync-delay 0", "repl-ping-replica-period 1"]
        return super()._configuration(port) + "\n".join([*own, *self.lines, ""])

    def ask(self, *command: str | int) -> Any:
        """Return the answer to a command."""
        with self.client() as client:
            return client.execute_command(*command)

    def _url(self, port: int) -> str:
        url = super()._url(port)
        return f"rediss{url.removeprefix('redis')}?ssl_ca_certs={self._tls.ca}" if self._tls else url

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self._url(self.port), decode_responses=True, retry=Retry(NoBackoff(), 0))

    def follow(self, master: Node) -> None:
        """Be a replica of this master from the next start on, as a configuration says that Sentinel has rewritten."""
        self.lines = [line for line in self.lines if not line.startswith("replicaof")]
        self.lines.append(f"replicaof 127.0.0.1 {master.port}")

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Sentinel(Node):
    """A sentinel: the same program by another name, which rewrites its own configuration."""

    def __init__(self, folder: Path, port: int, lines: list[str], tls: Tls | None = None) -> None:
        super().__init__(folder, port, lines, tls)
        self._password = SENTINEL_PASSWORD

    def _configuration(self, port: int) -> str:
        lines = ["bind 127.0.0.1", f"port {port}", f"requirepass {SENTINEL_PASSWORD}", f"dir {self.folder}"]
        return "\n".join([*lines, f"sentinel sentinel-pass {SENTINEL_PASSWORD}", "logfile redis.log", *self.lines, ""])

    def _start_at(self, program: str, port: int) -> None:
        name = self.folder / "redis-sentinel"
        name.unlink(missing_ok=True)
        name.symlink_to(program)
        super()._start_at(str(name), port)


class WatchedRedis:
    """A master with replicas that its sentinels watch; see `watched_redis`."""

    def __init__(self, folder: Path, *, replicas: int, lines: list[str], tls: Tls | None) -> None:
        self._tls = tls
        ports = free_ports(replicas + 4)
        self.nodes = [
            Node(folder / f"node-{place}", port, [*lines, *([f"replicaof 127.0.0.1 {ports[0]}"] * (place > 0))], tls)
            for place, port in enumerate(ports[:-3])
        ]
        watch = [
            f"sentinel monitor {MASTER} 127.0.0.1 {ports[0]} 2",
            f"sentinel auth-pass {MASTER} {PASSWORD}",
            f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {MASTER} 1000",
        ]
        self.sentinels = [Sentinel(folder / f"sentinel-{port}", port, watch, tls) for port in ports[-3:]]

    @property
    def url(self) -> str:
        """The URL of the master, wherever it is."""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        scheme, trust = ("rediss", f"&ssl_ca_certs={self._tls.ca}") if self._tls else ("redis", "")
        return f"{scheme}+sentinel://:{PASSWORD}@{hosts}/{MASTER}/0?sentinel_password={SENTINEL_PASSWORD}{trust}"

    def start(self, stack: contextlib.ExitStack) -> None:
        """Start all, and return when all replicas follow the master and all sentinels know each other."""
        for node in self.nodes:
            stack.enter_context(node)
        self.await_replicas()
        for sentinel in self.sentinels:
            stack.enter_context(sentinel)
        self.await_sentinels()

    def await_sentinels(self) -> None:
        """Wait until each sentinel knows the others, and all replicas: then they can replace the master."""

        def is_ready(sentinel: Sentinel) -> bool:
            with sentinel.client() as client:
                state = client.sentinel_master(MASTER, return_responses=True)
            return (state["num-other-sentinels"], state["num-slaves"]) == (2, len(self.nodes) - 1)

        wait_until(lambda: all(map(is_ready, self.sentinels)), "the sentinels know each other")

    def await_replicas(self) -> None:
        """Wait until all other nodes follow the master, and have all that it has."""

        def all_follow() -> bool:
            states = [replication_of(node) for node in self.nodes]
            offsets = {state["master_repl_offset"] for state in states}
            links = [state["master_link_status"] for state in states if state["role"] == "slave"]
            return links == ["up"] * (len(states) - 1) and len(offsets) == 1

        wait_until(all_follow, "all replicas follow")

    @property
    def master(self) -> Node:
        """The node that most sentinels name."""
        named = [sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)[1] for sentinel in self.sentinels]
        port = int(max(named, key=named.count))
        return next(node for node in self.nodes if node.port == port)

    @property
    def replicas(self) -> list[Node]:
        master = self.master
        return [node for node in self.nodes if node is not master]

    def cut_replicas(self) -> None:
        """Let no write reach the replicas from now on: those that the master confirms are lost with it."""
        for replica in self.replicas:
            replica.ask("CONFIG", "SET", "masterauth", "sesame")
        self.master.ask("CLIENT", "KILL", "TYPE", "replica")

    def replace_master(self) -> Node:
        """Kill the master, wait for another, start the old one as its replica, and return the new one."""
        old = self.master
        old.kill()
        new = self.await_failover(old)
        old.follow(new)
        old.start()
        for node in self.nodes:
            node.ask("CONFIG", "SET", "masterauth", PASSWORD)
        self.await_replicas()
        self.await_sentinels()
        return new

    def await_failover(self, old: Node) -> Node:
        """Wait until another node than this one is the master for all sentinels, and return it."""

        def is_replaced() -> bool:
            ports = {sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)[1] for sentinel in self.sentinels}
            new = self.master
            return len(ports) == 1 and new is not old and replication_of(new)["role"] == "master"

        wait_until(is_replaced, "another master")
        return self.master


def replication_of(node: Node) -> dict[str, Any]:
    """Return what a node says of its replication."""
    with node.client() as client:
        state: dict[str, Any] = client.info("replication")
    return state


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
            if condition():
                return
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.05)


@contextlib.contextmanager
def watched_redis(
    folder: Path, *, replicas: int = 2, lines: list[str] | None = None, tls: Tls | None = None
) -> Iterator[WatchedRedis]:
    """Run a master with so many replicas, and three sentinels. `lines`: of the nodes' configuration besides."""
    watched = WatchedRedis(folder, replicas=replicas, lines=lines or [], tls=tls)
    with contextlib.ExitStack() as stack:
        watched.start(stack)
        yield watched
