"""The scaling rules of the original EDL's controller, for comparison: `pkg/autoscaler.go` of PaddlePaddle/edl, 2019.

Its rules, not its code. One difference: where the original's dry run never returns, this one ends. Scaling up may use
all GPUs and scaling down leaves some free, so a GPU may be given and taken in turn; with 10 GPUs, 9 used and a maximum
load of 0.97, the controller looped for ever unless nodes ran out of CPU, which the dry run takes and never gives back.
Here the first repeated state ends it, after a full round, when what was given has been taken back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

MAX_LOAD = 0.97
"""The controller's own default. Its tutorial uses 0.9 and its tests 1."""


class Trainers(msgspec.Struct, frozen=True, kw_only=True):
    """A job's trainers: bounds, requested number, and the request of each (CPUs in thousandths, memory in MB)."""

    name: str
    min: int
    max: int
    wanted: int
    gpu: int = 0
    cpu: int = 0
    memory: int = 0


class ClusterTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a cluster, requests of all its pods, pending ones too, and each node's idle CPU and memory."""

    gpu: int = 0
    cpu: int = 0
    memory: int = 0
    gpu_asked: int = 0
    cpu_asked: int = 0
    memory_asked: int = 0
    nodes: Mapping[str, tuple[int, int]] = {}


class OriginalPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How many trainers each job should have, whether the original would have ended, and after how many rounds."""

    wanted: Mapping[str, int]
    ends: bool
    rounds: int


class _Requests:
    """The requests during the dry run."""

    def __init__(self, survey: ClusterTotals, max_load: float) -> None:
        self.survey = survey
        self.gpu, self.cpu, self.memory = survey.gpu_asked, survey.cpu_asked, survey.memory_asked
        self.idle = dict(survey.nodes)
        self.gpu_limit = int(survey.gpu * max_load)
        self.cpu_limit = int(survey.cpu * max_load)
        self.memory_limit = int(survey.memory * max_load)

    def add(self, job: Trainers, trainers: int) -> None:
        self.gpu += job.gpu * trainers
        self.cpu += job.cpu * trainers
        self.memory += job.memory * trainers

    def step_up(self, job: Trainers, planned: int) -> int:
        """Grow a job by a trainer if there is room; return by how many."""
        if planned >= job.max:
            step = job.max - planned
        elif self.survey.memory - self.memory <= job.memory or (node := self._node(job)) is None:
            step = 0
        else:
            fits = self.cpu_limit - self.cpu >= job.cpu and (not job.gpu or self.survey.gpu - self.gpu >= job.gpu)
            step = int(fits)
            cpu, memory = self.idle[node]
            self.idle[node] = cpu - job.cpu * step, memory - job.memory * step
        self.add(job, step)
        return step

    def step_down(self, job: Trainers, planned: int) -> int:
        """Shrink a job by a trainer if the load is too high; return -1 or 0."""
        over = self.gpu > self.gpu_limit or self.cpu > self.cpu_limit or self.memory > self.memory_limit
        step = -int(planned > job.max or (over and planned > job.min))
        self.add(job, step)
        return step

    def _node(self, job: Trainers) -> str | None:
        """Return the first node with the CPU and memory idle. The original ignores GPUs here."""
        return next((name for name, (cpu, mem) in self.idle.items() if cpu >= job.cpu and mem >= job.memory), None)


def original_plan(jobs: Sequence[Trainers], survey: ClusterTotals, *, max_load: float = MAX_LOAD) -> OriginalPlan:
    """Return how many trainers each of these jobs should have.

    Elastic jobs are sorted by fulfillment, their position between their bounds, then by a trainer's requests. In that
    order each grows by one where there is room; in reverse order each shrinks by one while requests exceed the maximum
    load. This repeats until nothing changes.
    """
    order = sorted((job for job in jobs if job.min < job.max), key=_fulfillment)
    ledger = _Requests(survey, max_load)
    planned = {job.name: job.wanted for job in jobs}
    seen: set[tuple[object, ...]] = set()
    rounds = 0
    while (state := (*planned.values(), *ledger.idle.values())) not in seen:
        seen.add(state)
        rounds += 1
        changed = False
        for jobs_in_turn, step in ((order, ledger.step_up), (order[::-1], ledger.step_down)):
            for job in jobs_in_turn:
                by = step(job, planned[job.name])
                planned[job.name] += by
                changed = changed or by != 0
        if not changed:
            return OriginalPlan(wanted=planned, ends=True, rounds=rounds)
    return OriginalPlan(wanted=planned, ends=False, rounds=rounds)


def _fulfillment(job: Trainers) -> tuple[float, int, int, int]:
    return (job.wanted - job.min) / (job.max - job.min), job.gpu, job.cpu, job.memory
