"""The verbs of a backend: where instances run.

`edl_runtime.backends.local` runs processes on this machine, `edl_runtime.backends.kubernetes` pods. The suite in
`tests/contract` says what every backend has to do and is run on each.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Literal, Protocol

import msgspec

from edl_runtime.backends.errors import OwnedElsewhereError
from edl_runtime.errors import EX_CONFIG, EX_DATAERR, SpecError
from edl_runtime.specs import Bounds, JobKind, JobSpec

Phase = Literal["pending", "running", "succeeded", "failed"]
InstancePhase = Literal["pending", "running", "succeeded", "failed"]

SUSPENDED = "suspended: it goes on when it is given instances"
"""The `reason` of a job or pool that `Backend.resize` has suspended."""


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process or pod. `exit_code` is None while it runs, negative for a signal. Times are Unix seconds.

    `pending`: it waits for its place, its image or the like. `given_up`: it has failed and is not started again, though
    the job goes on; see `JobStatus.attainable`. `disruptions`: how often the cluster has ended it, as by an eviction;
    it is replaced then, and that is no failure. `disrupted`: the last time is now. `pod`: its name, of a pod. `node`:
    where it is, empty while it has no place. `leaving`: it has been told to end, by whomever; another may take its
    place already. `reason`: what is wrong with it, for people; empty otherwise.
    """

    index: int
    phase: InstancePhase
    started_at: float
    restarts: int = 0
    disruptions: int = 0
    disrupted: bool = False
    exit_code: int | None = None
    given_up: bool = False
    pod: str = ""
    node: str = ""
    leaving: bool = False
    reason: str = ""


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """What decides how many instances a job or pool should have, beside how many it has.

    - `bounds`: between which numbers it can be resized; 0, besides, suspends it.
    - `resources`: what one instance reserves, by name: "cpu" in cores, "memory" in bytes, "gpu", and others as their
      node calls them.
    - `priority`, `weight`: as in its `JobSpec`.
    - `resumes`: whether one that is suspended goes on where it was: a pool, or elastic trainers with checkpoints.
    - `resized_at`: when it was last given another number of instances, in Unix seconds; None for never. That a job of
      trainers was suspended while none of them had a place does not count.
    - `queue`: the queue of Kueue's that it is in, where Kueue alone says when it begins and when it is suspended: it
      can't be resized to 0, while it runs only where Kueue lets it, and to more only when all have been admitted.
      Empty for none.
    - `node_selector`, `tolerations`: on which nodes its instances may run, as in a pod's spec, and `node_terms`, those
      of an affinity of which one has to hold; None for no affinity. See `edl_runtime.backends.placement`.
    """

    bounds: Bounds
    resources: dict[str, float]
    priority: int = 0
    weight: float = 1.0
    resumes: bool = False
    resized_at: float | None = None
    queue: str = ""
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, Any], ...] = ()
    node_terms: tuple[dict[str, Any], ...] | None = None


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the backend knows of a job or pool.

    - `phase`: a job that runs may have instances that are pending still; one that is pending itself may have none yet,
      as while it waits in a queue, or none any more: see `is_suspended`.
    - `elastic`: whether its instances are agents of elastic trainers; see `JobSpec`.
    - `token`: who may kill it; see `Backend.delete`.
    - `cwd`: the folder that its instances start in, empty if each has one of its own.
    - `wanted`: the number of instances asked for, 0 while it is suspended; `instances` are those that exist, by index.
    - `scaling`: what decides how many it should have; None of a job that has ended, or is being deleted.
    - `replaced`: the pods of a pool that the cluster has ended, as by an eviction, and still shows though others take
      their places: of each, how it ended, the oldest first.
    - `reason`: why it failed, why it waits, or why an instance of one that runs does not come up, for people; empty
      otherwise.
    - `last_lines`: the end of the log of the instance that `reason` is about; empty otherwise.
    - `result`: what was left by `edl_runtime.result.write_result`, of several instances the newest; None before.
    - `invalid_spec`: it has failed by what it was given, which the backend knows without an exit status: an image that
      is not there, say.
    - `most_disruptions`: it fails when the cluster has ended one of its instances more often than that; None for never.
    """

    name: str
    kind: JobKind
    phase: Phase
    token: str
    digest: str
    wanted: int
    scaling: Scaling | None = None
    instances: tuple[InstanceStatus, ...] = ()
    replaced: dict[str, str] = {}
    created_at: float
    elastic: bool = False
    cwd: str = ""
    reason: str = ""
    last_lines: tuple[str, ...] = ()
    result: dict[str, Any] | None = None
    invalid_spec: bool = False
    most_disruptions: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it has succeeded or failed."""
        return self.phase in ("succeeded", "failed")

    @property
    def attainable(self) -> int:
        """How many instances it can still come to have: those wanted, without those that were given up."""
        return max(0, self.wanted - sum(instance.given_up for instance in self.instances))

    @property
    def is_suspended(self) -> bool:
        """Whether it is to have no instances for now; those that it had may still be leaving."""
        return self.wanted == 0 and not self.has_ended

    @property
    def is_disrupted(self) -> bool:
        """Whether it has failed by what the cluster did to its instances, so that it may well succeed later."""
        limit = self.most_disruptions
        return (
            self.phase == "failed"
            and limit is not None
            and any(instance.disruptions > limit for instance in self.instances)
        )

    @property
    def failed_permanently(self) -> bool:
        """Whether what it was given is wrong, if it has failed, so that submitting it again is pointless.

        Of elastic trainers, an instance that was given up speaks for itself alone where another says that all failed.
        """
        failed = [instance for instance in self.instances if instance.phase == "failed"]
        said = [instance for instance in failed if not instance.given_up and (instance.exit_code or 0) > 0]
        deciding = said if self.elastic and said else failed
        return self.invalid_spec or any(instance.exit_code in (EX_CONFIG, EX_DATAERR) for instance in deciding)


def check_size(instances: object, bounds: Bounds) -> int:
    """Return `instances` if a job with these bounds can be resized to it, else raise SpecError."""
    if not isinstance(instances, int) or isinstance(instances, bool):
        raise SpecError("instances", instances, "a whole number")
    if instances != 0 and instances not in bounds:
        raise SpecError("instances", instances, f"0, or {bounds.min} to {bounds.max}")
    return instances


def token_owner(token: str) -> str:
    """Return the OWNER of a token "OWNER/TRY": the same for all tries of one task. Empty for nobody's token."""
    return token.rpartition("/")[0]


def check_owner(job: JobStatus | None, token: str) -> None:
    """Raise OwnedElsewhereError if `job` has not ended and belongs to another owner than `token` does."""
    if job and not job.has_ended and (owner := token_owner(job.token)) not in ("", token_owner(token)):
        raise OwnedElsewhereError(job.name, job.kind, owner)


class LogLine(msgspec.Struct, frozen=True):
    """A line of an instance's output, without its newline."""

    instance: int
    text: str


class NodeCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """A node of instances: what it has in `total`, by the names of `Scaling.resources`, and what of it is `free`.

    One that takes no more has no more than what is there reserves, and nothing is free.

    `free` is beside all that is there, whoever started it, where instances that are leaving count as gone: whoever
    wants their room gets it in a moment. `labels`: those of the node; None where it has none, as this machine or a
    quota, so that whatever a job asks of them holds. `taints`: those that keep instances away unless these tolerate
    them, each with `key`, `value` and `effect`, "NoSchedule" or "NoExecute". See `edl_runtime.backends.placement`.
    """

    name: str
    total: dict[str, float]
    free: dict[str, float]
    labels: dict[str, str] | None = None
    taints: tuple[dict[str, str], ...] = ()


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What there is for instances.

    - `nodes`: those that instances may be on, by name.
    - `quota_total`, `quota_left`: what all instances together may have whatever the nodes have, by resource, and what
      is left of it, in which instances that have no node yet or are leaving count as gone. Empty for no such limit.
    - `only_node`: where the backend sees no nodes, the name of the one in `nodes` that stands for all, and has what
      the quota has. It is not what `InstanceStatus.node` says; see `place_of`.
    """

    nodes: tuple[NodeCapacity, ...]
    quota_total: dict[str, float] = {}
    quota_left: dict[str, float] = {}
    only_node: str = ""

    @property
    def total(self) -> dict[str, float]:
        """What all nodes have together, by resource."""
        return _sums(node.total for node in self.nodes)

    @property
    def free(self) -> dict[str, float]:
        """What is free on all nodes together, by resource."""
        return _sums(node.free for node in self.nodes)

    def place_of(self, instance: InstanceStatus) -> str:
        """Return under which name the node of an instance is in `nodes`, if at all; empty while it has no place.

        A planner has to ask this: with `only_node` all instances that have a place are there, and the place of one
        that is leaving counts as free.
        """
        return "" if instance.leaving else instance.node and (self.only_node or instance.node)


def _sums(quantities: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in quantities:
        for name, amount in each.items():
            found[name] = found.get(name, 0.0) + amount
    return found


class Backend(Protocol):
    """Where instances run. Every verb is safe to repeat: doing it twice is doing it once."""

    async def submit(self, spec: JobSpec, *, token: str, secrets: Mapping[str, str]) -> JobStatus:
        """Get or create the job `spec.name` and let it carry `token`, "OWNER/TRY" or a plain word; see `token_owner`.

        A job of that name with the same spec that runs or has succeeded is adopted as it is. Any other job of that
        name is stopped first, down to its last process, and a new one is started. A running job of another owner
        is neither adopted nor stopped. `secrets` are environment variables for the instances that are never
        written down.

        Raises OwnedElsewhereError; SubmitError when it can't be started.
        """
        ...

    async def get(self, name: str) -> JobStatus:
        """Return the job's status. Raises UnknownJobError."""
        ...

    async def list(self) -> list[JobStatus]:
        """Return all jobs and pools, by name."""
        ...

    async def resize(self, name: str, instances: int) -> JobStatus:
        """Change the wanted number of instances; the highest index leaves first, by SIGTERM and its grace.

        0, whatever the bounds, suspends a job or pool: all instances leave, and it is pending until another number
        resumes it. Elastic trainers write a checkpoint before they leave. A larger number also tries instances anew
        that had been given up. Returns when the wish is recorded, not when it is fulfilled. Raises UnknownJobError;
        SpecError for any other number outside the job's bounds; BackendError for a job that has ended, and for what
        the queue of a job does not let it have; see `Scaling.queue`.
        """
        ...

    def logs(
        self, name: str, *, instance: int | None = None, tail: int | None = None, follow: bool = False
    ) -> AsyncGenerator[LogLine, None]:
        """Yield the output of all instances, or of one `instance`.

        Only the last `tail` lines of each, if given; with `follow`, what they go on to write until the job ends.
        Also serves the logs of a job that has been deleted.

        Raises UnknownJobError.
        """
        ...

    async def owner(self, name: str) -> str:
        """Return whose the job is, or was, that `logs` serves: the OWNER of its token, empty for nobody's.

        Also of a job that has been deleted. Raises UnknownJobError.
        """
        ...

    async def delete(self, name: str, *, token: str | None = None) -> bool:
        """Stop the job, down to its last process, and forget it; what its instances wrote is kept.

        With a `token`, only if the job still carries it: a kill never hits a later try's work. Returns whether
        there was something to delete.
        """
        ...

    async def capacity(self) -> Capacity:
        """Return what there is for instances, and what of it is free now.

        Raises BackendError where that can't be known, which says what is to be granted.
        """
        ...
