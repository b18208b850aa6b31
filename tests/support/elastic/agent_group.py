"""Real agents with real trainers, each agent a process, and their events, logs and exit statuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import redis
from support.elastic.fake_agent import read_json_lines
from support.paths import TRAINING_SCRIPTS

from edl_runtime.elastic.rendezvous.redis_store import Event, EventKind, read_events
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store import keys
from edl_runtime.store.errors import RegistryTimeoutError
from edl_runtime.store.redis_client import connect

SCRIPT = TRAINING_SCRIPTS / "elastic_script.py"
IMPATIENT = Path(__file__).with_name("impatient_agent.py")

PATIENCE_S = 150.0


class Group:
    """The agents of one job; see `running_group`. `out`: the folder of logs of the script and of agents."""

    def __init__(
        self, out: Path, settings: RuntimeSettings, instances: str, gear: str, command: list[str], *, edl: list[str]
    ) -> None:
        self.out = out
        self.settings = settings
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self._flags = ["--instances", instances, "--gear", gear]
        self._command = command
        self._edl = edl
        self._environ: dict[str, str] = {}

    def option(self, **options: Any) -> None:
        """Set options of elastic_script for agents that are started from now on."""
        self._environ["SCRIPT_OPTIONS"] = json.dumps(options)

    def start(self, *instances: int, url: str = "") -> None:
        """Start agents, with the Redis at `url` if it is given."""
        for instance in instances:
            own = RuntimeSettings.to_env(self.settings) | {"EDL_INSTANCE": str(instance)}
            with (self.out / f"{instance}.log").open("ab") as log:
                self.agents[instance] = subprocess.Popen(
                    [sys.executable, *self._edl, "agent", *self._flags, "--", *self._command],
                    env={
                        **os.environ,
                        **own,
                        **({"EDL_REDIS_URL": url} if url else {}),
                        "OMP_NUM_THREADS": "1",
                        "GLOG_minloglevel": "2",
                        "PYTHONWARNINGS": "ignore",
                        **self._environ,
                    },
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                )

    def trainer(self, instance: int) -> psutil.Process:
        """Return the instance's trainer: the last that was started, so neither a standby nor an earlier one."""
        log = self.log(instance)
        started = re.findall(r"worker\.started .*\bpid=(\d+)", log)
        agent = psutil.Process(self.agents[instance].pid)
        found = [child for child in agent.children() if started and child.pid == int(started[-1])]
        assert found, f"instance {instance} has no trainer:\n{log}"
        return found[0]

    def kill(self, instance: int) -> None:
        """Kill an instance's agent and trainer at once, as when a machine fails."""
        trainer = self.trainer(instance)
        self.agents[instance].kill()
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends with its agent by itself
            trainer.kill()
        self.await_exit(instance)

    def terminate(self, instance: int) -> None:
        """Send SIGTERM to an instance's agent."""
        self.agents[instance].terminate()

    def await_exit(self, instance: int) -> int:
        """Remove an agent from the group, wait until it has ended, and return its exit status."""
        return self.agents.pop(instance).wait(PATIENCE_S)

    def events(self) -> list[Event]:
        async def read() -> list[Event]:
            async with connect(self.settings.redis_url) as client:
                return await read_events(client, self.settings.namespace, self.settings.job)

        while True:
            with contextlib.suppress(RegistryTimeoutError):  # on a busy machine
                return asyncio.run(read())

    def await_event(self, kind: EventKind, matches: Callable[[Event], bool] = lambda _: True) -> Event:
        """Return the last event of that kind, once there is one."""
        return self._last_of(lambda events: [each for each in events if each.kind == kind and matches(each)])

    def _last_of(self, choose: Callable[[list[Event]], list[Event]]) -> Event:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            # asked before the events are read: an agent's last ones come before its end
            have_ended = all(agent.poll() is not None for agent in self.agents.values())
            if chosen := choose(self.events()):
                return chosen[-1]
            if time.monotonic() > deadline or have_ended:
                raise AssertionError(f"not within {PATIENCE_S:.0f} s; there was:\n{self.history()}")
            time.sleep(0.05)

    def await_generation(self, *members: int, after: int = 0) -> Event:
        """Wait for an active generation later than `after` of these instances in any order; return its first event."""

        def choose(events: list[Event]) -> list[Event]:
            up = {event.generation for event in events if event.kind == "active"}
            return [
                event
                for event in events
                if event.kind == "forming"
                and event.generation > after
                and set(event.members) == set(members)
                and event.generation in up
            ]

        return self._last_of(choose)

    def await_steps(self, count: int) -> None:
        """Wait until `count` more steps are done."""
        begin = self._last_step()
        self.await_condition(lambda: self._last_step() >= begin + count, f"{count} more steps")

    def await_standbys(self) -> None:
        """Wait until each agent has published that it has a standby."""
        self.await_members(
            lambda members: len(members) == len(self.agents) and all(each["standby"] for each in members)
        )

    def await_members(self, condition: Callable[[list[dict[str, Any]]], object]) -> None:
        """Wait until the records of members in Redis meet a condition."""
        records = keys.group_keys(self.settings.namespace, self.settings.job)[1]
        with redis.Redis.from_url(self.settings.redis_url) as client:
            self.await_condition(lambda: condition([json.loads(each) for each in client.hvals(records)]), "members")

    def await_log(self, instance: int, text: str) -> str:
        """Wait until an instance's log has this text, and return what follows it."""
        self.await_condition(lambda: text in self.log(instance), text)
        return self.log(instance).partition(text)[2]

    def log(self, instance: int) -> str:
        return (self.out / f"{instance}.log").read_text()

    def _last_step(self) -> int:
        return max((each["step"] for each in self.stepped()), default=0)

    def await_condition(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:.0f} s\n{self.logs()}"
            time.sleep(0.05)

    def statuses(self) -> dict[int, int]:
        """Wait until all agents have ended; return their exit statuses."""
        deadline = time.monotonic() + PATIENCE_S
        try:
            return {
                instance: agent.wait(max(0.1, deadline - time.monotonic())) for instance, agent in self.agents.items()
            }
        except subprocess.TimeoutExpired:
            raise AssertionError(f"agents have not ended\n{self.logs()}") from None

    def history(self) -> str:
        """Return all events and logs."""
        return "\n".join([*(event.line() for event in self.events()), self.logs()])

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(self.out.glob("*.log")))

    def stepped(self) -> list[dict[str, Any]]:
        """Return the steps that trainers have logged, by time."""
        return sorted(read_json_lines(self.out.glob("stepped-*.jsonl")), key=lambda each: each["at"])

    def check_no_step_twice(self, *, killed: int = 0) -> None:
        """Check that no rank did a step twice, but for the last step of each of `killed` ranks."""
        steps = Counter((each["step"], each["rank"]) for each in self.stepped())
        assert steps.total() - len(steps) <= killed, self.history()
        assert {step for step, _ in steps} == set(range(1, 1 + max(step for step, _ in steps)))


@contextlib.contextmanager
def running_group(
    out: Path,
    settings: RuntimeSettings,
    *,
    instances: str = "1:4",
    gear: str = "live",
    command: list[str] | None = None,
    impatient: bool = False,
    **options: Any,
) -> Iterator[Group]:
    """Yield a job's group without instances; its processes are killed afterwards. `options`: of elastic_script.

    `impatient`: its agents are those of impatient_agent.
    """
    out.mkdir(parents=True, exist_ok=True)
    edl = [str(IMPATIENT)] if impatient else ["-m", "edl_runtime.cli"]
    group = Group(out, settings, instances, gear, command or [str(SCRIPT), str(out)], edl=edl)
    group.option(**options)
    try:
        yield group
    finally:
        for agent in group.agents.values():
            family = []
            if agent.poll() is None:
                family = psutil.Process(agent.pid).children(recursive=True)
                agent.send_signal(signal.SIGKILL)
            agent.wait()
            _, left = psutil.wait_procs(family, timeout=PATIENCE_S)
            assert not left, f"trainers outlive their agent: {left}"
