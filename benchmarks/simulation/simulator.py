"""Discrete-event simulator: runs a policy on a trace of jobs beside a web tier with precedence.

Nothing changes between two events, so progress and times are exact. A job that is resized, started or resumed holds its
GPUs during the pause without progress. The web takes what it needs, whatever training has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from simulation.traces import ENDS_S, GPUS, Trace, TraceJob

from edl_runtime.autoscale.traffic.forecast import Sample

ROUNDING = 1e-6
"""Goodput-seconds that count as done: a time step below a float's resolution would never end."""


class SimulatedJob:
    """The state of a job."""

    __slots__ = (
        "changed_s",
        "done",
        "ended_s",
        "instances",
        "job",
        "paused_until_s",
        "pending_s",
        "resized_s",
        "resizes",
    )

    def __init__(self, job: TraceJob) -> None:
        self.job = job
        self.instances = 0
        self.done = 0.0
        self.pending_s = 0.0
        self.paused_until_s = 0.0
        self.changed_s: float | None = None
        self.resized_s: float | None = None
        self.resizes = -1  # its start does not count
        self.ended_s: float | None = None

    def advance(self, since_s: float, until_s: float) -> None:
        """Add progress, or waiting time."""
        if not self.instances:
            self.pending_s += until_s - since_s
        self.done += self.job.speedup.goodput(self.instances) * max(0.0, until_s - max(since_s, self.paused_until_s))

    def ends_s(self, now_s: float) -> float:
        """Return when it ends without a resize."""
        if not self.instances:
            return math.inf
        left = max(0.0, self.job.work - self.done)
        return max(now_s, self.paused_until_s) + left / self.job.speedup.goodput(self.instances)

    def resize(self, instances: int, now_s: float, pause_s: float) -> None:
        """Change the number of instances."""
        if instances == self.instances:
            return
        if bool(instances) != bool(self.instances):
            self.changed_s = now_s
        self.instances = instances
        self.resized_s = now_s
        self.paused_until_s = now_s + pause_s
        self.resizes += 1


class Planner(Protocol):
    """Decides how many instances each job has."""

    pause_s: float

    def plan(self, now_s: float, jobs: Sequence[SimulatedJob], web: Sequence[Sample]) -> Mapping[str, int]:
        """Return the instances of each job. `web`: the samples until now."""

    def again_s(self, now_s: float) -> float:
        """Return when to plan next at the latest; it also does at each event."""


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a trace: times in minutes, shares from 0 to 1.

    `pending`: how long a job had no instance, before its start or suspended; until the end for a job that did not end.
    `excess`: the share of time in which web and training together need more GPUs than there are. `utilisation`: the
    share of all GPU time that both use.
    """

    jobs: float
    done: float
    pending_min: float
    pending_p95_min: float
    completion_min: float
    utilisation: float
    excess: float
    resizes: float


def simulate(trace: Trace, planner: Planner, *, gpus: float = GPUS, ends_s: float = ENDS_S) -> SimulationResult:
    """Simulate a trace from time 0 to its end."""
    coming = [job for job in trace.jobs if job.submitted_s < ends_s][::-1]
    web = trace.web
    seen = max(number for number, sample in enumerate(web) if sample.at_s <= 0) + 1
    everyone: list[SimulatedJob] = []
    running: list[SimulatedJob] = []
    now_s = excess_s = used_s = 0.0
    again_s = 0.0
    while True:
        until_s = min(
            ends_s,
            again_s,
            coming[-1].submitted_s if coming else math.inf,
            web[seen].at_s if seen < len(web) else math.inf,
            min((one.ends_s(now_s) for one in running), default=math.inf),
        )
        training = sum(one.instances for one in running)
        together = training + web[seen - 1].needed
        used_s += min(gpus, together) * (until_s - now_s)
        excess_s += (until_s - now_s) if together > gpus + 1e-9 else 0.0
        for one in running:
            one.advance(now_s, until_s)
        now_s = until_s
        while coming and coming[-1].submitted_s <= now_s:
            everyone.append(SimulatedJob(coming.pop()))
            running.append(everyone[-1])
        while seen < len(web) and web[seen].at_s <= now_s:
            seen += 1
        for one in running:
            if one.instances and one.done >= one.job.work - ROUNDING:
                one.ended_s = now_s
        running = [one for one in running if one.ended_s is None]
        if now_s >= ends_s:
            break
        targets = planner.plan(now_s, running, web[:seen])
        for one in running:
            one.resize(targets.get(one.job.name, one.instances), now_s, planner.pause_s)
        again_s = planner.again_s(now_s)
    return _outcome(everyone, used_s / (gpus * ends_s), excess_s / ends_s, ends_s)


def _outcome(everyone: Sequence[SimulatedJob], utilisation: float, excess: float, ends_s: float) -> SimulationResult:
    pending = sorted(one.pending_s / 60 for one in everyone)
    completion = [((ends_s if one.ended_s is None else one.ended_s) - one.job.submitted_s) / 60 for one in everyone]
    count = max(1, len(everyone))
    return SimulationResult(
        jobs=len(everyone),
        done=sum(one.ended_s is not None for one in everyone),
        pending_min=sum(pending) / count,
        pending_p95_min=pending[math.ceil(0.95 * count) - 1] if pending else 0.0,
        completion_min=sum(completion) / count,
        utilisation=utilisation,
        excess=excess,
        resizes=sum(max(0, one.resizes) for one in everyone) / count,
    )
