"""Changes of the instances of one training, and their measurement, for `resize.py`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import msgspec
from _elastic_jobs import Job, Load
from _elastic_pauses import Log, Resumed, faults, pause_s, repeated, resumed, slowdown

from edl_runtime.elastic.comm.agent_protocol import Gear

POLL_EVERY_S = 0.05
SETTLED_STEPS = 20
SETTLE_LIMIT_S = 300.0

LOSSES = ("leave", "instance killed", "trainer killed", "trainer hangs")


class StuckError(Exception):
    """Raised when a training does not reach the state for the next change."""


class System(NamedTuple):
    """What runs the training. `own`: this project, named by its transition mode. `open` takes a folder and the load."""

    name: str
    own: bool
    open: Callable[[Path, Load], AbstractContextManager[Job]]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one change; `pause_s` is None if training did not resume within the patience.

    - `rank`: of the removed instance. `all_three_s`: until three trained again, where a replacement comes.
    - `slowdown`: ratio of step times while a new instance loaded. `repeated`: steps that were done twice.
    - `gear`: of this project's agents, which use a slower one when one fails, and at times to renew processes.
    """

    case: str
    rank: int | None = None
    pause_s: float | None = None
    total_s: float | None = None
    all_three_s: float | None = None
    slowdown: float | None = None
    repeated: int | None = None
    gear: Gear | None = None
    faults: list[str] = []


class Bench:
    """Changes the instances of one job and measures that."""

    def __init__(self, system: System, job: Job, patience_s: float) -> None:
        self._system = system
        self._job = job
        self._log = Log(job.folder)
        self._patience_s = patience_s

    def begin(self) -> None:
        """Start two instances."""
        for instance in (0, 1):
            self._job.start(instance)
        self.settle(2)

    def settle(self, world_size: int) -> Resumed:
        """Wait until `world_size` instances have trained for a while; return their generation."""

        def settled() -> Resumed | None:
            steps = self._log.steps()
            found = resumed(steps)
            if not found or len(found[-1].instances) != world_size:
                return None
            done = sum(step.generation == found[-1].generation for step in steps) / world_size
            return found[-1] if done >= SETTLED_STEPS and self._job.settled() else None

        found = self._await(settled, SETTLE_LIMIT_S)
        if found is None:
            raise StuckError(f"{self._system.name}: {world_size} instances do not train in {self._job.folder}")
        return found

    def join(self) -> Change:
        """Start the third instance."""
        before = self.settle(2)
        missing = ({0, 1, 2} - set(before.instances)).pop()
        return self._measure("join", before, lambda: self._job.start(missing), world_size=3)

    def lose(self, case: str, number: int) -> Change:
        """Remove an instance by a way of `LOSSES`, another one for each number where possible."""
        before = self.settle(3)
        instance = before.instances[number % 3] if self._system.own else 1 + number % 2
        if case == "leave" and self._job.removes_highest:
            instance = max(before.instances)
        last = next(step for step in reversed(self._log.steps()) if step.instance == instance)
        actions: dict[str, Callable[[], None]] = {
            "leave": lambda: self._job.terminate(instance),
            "instance killed": lambda: self._job.kill(instance),
            "trainer killed": lambda: self._job.signal_trainer(instance, last.pid, signal.SIGKILL),
            "trainer hangs": lambda: self._job.signal_trainer(instance, last.pid, signal.SIGSTOP),
        }
        change = self._measure(
            case,
            before,
            actions[case],
            rank=before.instances.index(instance),
            victim=None if case == "leave" else last.process,
        )
        if case == "leave" and change.pause_s is not None:
            self._job.wait_for_end(instance)
        return change

    def recovers(self, case: str) -> bool:
        """Whether the lost trainer is replaced after such a loss."""
        return case.startswith("trainer") or (case == "instance killed" and self._job.restarts_killed)

    def _measure(
        self,
        case: str,
        before: Resumed,
        act: Callable[[], None],
        *,
        world_size: int | None = None,
        rank: int | None = None,
        victim: tuple[str, int] | None = None,
    ) -> Change:
        began = time.time()
        act()
        after = self._next(before, world_size)
        if after is None:
            return Change(case=case, rank=rank)
        again = self._next(before, 3) if self.recovers(case) else None
        steps = self._log.steps()
        own = self._system.own
        return Change(
            case=case,
            rank=rank,
            pause_s=pause_s(steps, before.generation, after),
            total_s=after.at - began,
            all_three_s=again.at - began if again else None,
            slowdown=slowdown(steps, before.generation, began) if case == "join" else None,
            repeated=repeated(steps, after, victim) if own else None,
            gear=self._job.gears().get(after.generation),
            faults=faults(steps, before.generation) if own else [],
        )

    def _next(self, before: Resumed, world_size: int | None) -> Resumed | None:
        """Wait for a generation after `before`, of `world_size` instances if given."""

        def find() -> Resumed | None:
            found = resumed(self._log.steps(), before.generation)
            return next((each for each in found if world_size in (None, len(each.instances))), None)

        return self._await(find, self._patience_s)

    def _await(self, find: Callable[[], Resumed | None], patience_s: float) -> Resumed | None:
        until = time.monotonic() + patience_s
        while (found := find()) is None and time.monotonic() < until and self._job.running():
            time.sleep(POLL_EVERY_S)
        return found
