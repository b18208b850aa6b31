"""The rules by which EDL's controller sized jobs, kept to compare with: `pkg/autoscaler.go` of PaddlePaddle/edl, 2019.

They are its rules and not its code. One difference: where its dry run would go on for ever, this one ends. What goes
up may use all GPUs and what goes down leaves a part of them free, so a GPU is given and taken in turn; with 10 GPUs, 9
of them used and a maximum load of 0.97 the controller never came back, unless a trainer's CPU, which is taken from a
node each time and not given back, had run out. Here the second time that all is as it was before ends it, and after a
round: what was given has been taken back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

MAX_LOAD = 0.97
"""The controller's own default. Its tutorial uses 0.9 and its tests 1."""


class Trainers(msgspec.Struct, frozen=True, kw_only=True):
    """A job's trainers: bounds, how many are wanted, and what each asks for (CPUs in thousandths, memory in MB)."""

    name: str
    min: int
    max: int
    wanted: int
    gpu: int = 0
    cpu: int = 0
    memory: int = 0


class ClusterTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What a cluster has, what all its pods ask for, whether they run or wait, and each node's idle CPU and memory."""

    gpu: int = 0
    cpu: int = 0
    memory: int = 0
    gpu_asked: int = 0
    cpu_asked: int = 0
    memory_asked: int = 0
    nodes: Mapping[str, tuple[int, int]] = {}


class OriginalPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How many trainers each job is to have, and whether the original would have come to an end.

    `rounds` is how many it took.
    """

    wanted: Mapping[str, int]
    ends: bool
    rounds: int


class _Ledger:
    """What is asked for while the dry run goes on."""

    def __init__(self, survey: ClusterTotals, max_load: float) -> None:
        self.survey = survey
        self.gpu, self.cpu, self.memory = survey.gpu_asked, survey.cpu_asked, survey.memory_asked
        self.idle = dict(survey.nodes)
        self.gpu_limit = int(survey.gpu * max_load)
        self.cpu_limit = int(survey.cpu * max_load)
        self.memory_limit = int(survey.memory * max_load)

    def ask(self, job: Trainers, trainers: int) -> None:
        self.gpu += job.gpu * trainers
        self.cpu += job.cpu * trainers
        self.memory += job.memory * trainers

    def step_up(self, job: Trainers, planned: int) -> int:
        """Return by how many trainers a job grows, and ask for them."""
        if planned >= job.max:
            step = job.max - planned
        elif self.survey.memory - self.memory <= job.memory or (node := self._node(job)) is None:
            step = 0
        else:
            fits = self.cpu_limit - self.cpu >= job.cpu and (not job.gpu or self.survey.gpu - self.gpu >= job.gpu)
            step = int(fits)
            cpu, memory = self.idle[node]
            self.idle[node] = cpu - job.cpu * step, memory - job.memory * step
        self.ask(job, step)
        return step

    def step_down(self, job: Trainers, planned: int) -> int:
        """Return -1 if a job shrinks by a trainer, and give it back, else 0."""
        over = self.gpu > self.gpu_limit or self.cpu > self.cpu_limit or self.memory > self.memory_limit
        step = -int(planned > job.max or (over and planned > job.min))
        self.ask(job, step)
        return step

    def _node(self, job: Trainers) -> str | None:
        """Return the first node that has the CPU and memory idle. GPUs it does not look at."""
        return next((name for name, (cpu, mem) in self.idle.items() if cpu >= job.cpu and mem >= job.memory), None)


def original_plan(jobs: Sequence[Trainers], survey: ClusterTotals, *, max_load: float = MAX_LOAD) -> OriginalPlan:
    """Return how many trainers each of these jobs is to have.

    Elastic jobs are sorted by fulfillment, how far each is between its bounds, and then by what a trainer asks for. In
    that order each grows by one where there is room; in the other direction each shrinks by one while more is asked for
    than the maximum load allows. That is repeated until nothing changes.
    """
    order = sorted((job for job in jobs if job.min < job.max), key=_fulfillment)
    ledger = _Ledger(survey, max_load)
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
