"""The interface of backends, which run instances as processes (`local`) or as pods (`kubernetes`).

`tests/contract` runs the same tests on both.
"""

from __future__ import annotations

import builtins
import re
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, Protocol

import msgspec

from edl_runtime.backends.errors import OwnedElsewhereError, exception_line, with_cause
from edl_runtime.errors import EX_CONFIG, EX_DATAERR
from edl_runtime.specs import Bounds, JobKind, JobSpec

Phase = Literal["pending", "running", "succeeded", "failed"]

SUSPENDED = "suspended: it resumes when it is resized to one or more instances"
"""The `reason` of a job or pool that was resized to 0 without one."""

MAX_REASON_LENGTH = 500
"""Longer reasons of a resize are cut, in characters."""


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process or pod. `exit_code` is None while it runs, negative for a signal. Times are Unix seconds.

    - `pending`: it waits for a node, its image or the like.
    - `given_up`: it has failed and is not started again, but the job continues; see `JobStatus.attainable`.
    - `disruptions`: how often the cluster has ended and replaced it, as by an eviction; `disrupted`: just now.
    - `pod`: the pod's name. `node`: empty while it has none.
    - `leaving`: it is being terminated; its successor may run already.
    - `reason`: what is wrong with it, for people, or empty.
    """

    index: int
    phase: Phase
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
    """What a planner needs to know to resize a job or pool.

    - `bounds`: the sizes it can have; 0 besides suspends it.
    - `resources`: what one instance reserves: "cpu" in cores, "memory" in bytes, "gpu", extended resources by name.
    - `priority`, `weight`: as in its `JobSpec`.
    - `resumes`: whether it continues its work after a suspension: a pool, or elastic trainers with checkpoints.
    - `pool`: the EDL_POOL of its instances, which is the pool that they ask, or join as teachers; empty without one.
    - `resized_at`: Unix time of the last resize, or None. Suspending trainers none of which had a node does not count.
    - `resized_for`: why it was resized last, in the words of who did it; empty where nobody said.
    - `queue`: its Kueue queue, or empty. Kueue alone starts and suspends such a job, so it can't be resized to 0. It
      grows only once all its pods are admitted. `queue_resizes`: whether Kueue lets it be resized while it runs.
    - `node_selector`, `tolerations`: as in a pod's spec. `node_terms`: the node selector terms of its required node
      affinity, of which one has to match, or None. See `edl_runtime.backends.placement`.
    """

    bounds: Bounds
    resources: dict[str, float]
    priority: int = 0
    weight: float = 1.0
    resumes: bool = False
    pool: str = ""
    resized_at: float | None = None
    resized_for: str = ""
    queue: str = ""
    queue_resizes: bool = False
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, Any], ...] = ()
    node_terms: tuple[dict[str, Any], ...] | None = None


AirflowId = Annotated[str, msgspec.Meta(min_length=1, max_length=250)]
"""As Airflow has them: whoever may change a job can't make it ask for another one."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The Airflow task instance that has started a job or pool, of whichever try.

    - `airflow`: the id of its Airflow, as several may share a backend; empty if that could not be told.
    - `map_index`: -1 for a task that is not mapped.
    - `outlives_task`: it stays when its task has succeeded, as a pool that other tasks use.
    """

    airflow: Annotated[str, msgspec.Meta(max_length=250)]
    dag_id: AirflowId
    run_id: AirflowId
    task_id: AirflowId
    map_index: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] = -1
    outlives_task: bool = False

    def __str__(self) -> str:
        mapped = f"[{self.map_index}]" if self.map_index >= 0 else ""
        return f"task {self.dag_id}.{self.task_id}{mapped} of run {self.run_id}"


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a job or pool.

    - `phase`: "running" with instances still pending is possible; "pending" is queued or suspended.
    - `elastic`: its instances are agents of elastic trainers; see `JobSpec`.
    - `token`: who may delete it; see `Backend.delete`.
    - `origin`: whose task has started it; None if no task of Airflow's has.
    - `starting`: a submit of it has not ended, or was interrupted: repeat it.
    - `cwd`: the folder that its instances start in, empty if each has its own.
    - `wanted`: the requested number of instances, 0 while suspended. `instances`: those that exist, by index.
    - `scaling`: None once it has ended or is being deleted.
    - `replaced`: by name, how pods of a pool ended that the cluster has evicted and not yet removed, oldest first.
    - `reason`: why it failed, waits, or has an instance that does not start, for people, or empty.
    - `last_lines`: the end of the log of the instance that `reason` is about.
    - `result`: the newest that an instance left by `edl_runtime.result.write_result`, or None.
    - `invalid_spec`: it has failed for its spec, known without an exit status, as an image that does not exist.
    - `most_disruptions`: it fails when the cluster has ended one of its instances more often than that; None: never.
    """

    name: str
    kind: JobKind
    phase: Phase
    token: str
    digest: str
    wanted: int
    origin: Origin | None = None
    scaling: Scaling | None = None
    instances: tuple[InstanceStatus, ...] = ()
    replaced: dict[str, str] = {}
    created_at: float
    elastic: bool = False
    starting: bool = False
    cwd: str = ""
    reason: str = ""
    last_lines: tuple[str, ...] = ()
    result: dict[str, Any] | None = None
    invalid_spec: bool = False
    most_disruptions: int | None = None

    @property
    def has_ended(self) -> bool:
        return self.phase in ("succeeded", "failed")

    @property
    def why(self) -> str:
        """Its `reason`; of a failed one with the line of its output that says most about it."""
        return with_cause(self.reason, self.last_lines) if self.phase == "failed" else self.reason

    @property
    def attainable(self) -> int:
        """The requested number of instances without those that were given up."""
        return max(0, self.wanted - sum(instance.given_up for instance in self.instances))

    @property
    def pool(self) -> str:
        """The pool that its instances ask, or are the teachers of; empty for none that is known."""
        named = self.scaling.pool if self.scaling else ""
        return named or (self.name if self.kind == "pool" else "")

    @property
    def training_job(self) -> str:
        """The name of the TrainingJob that it was made for, whose controller makes it again; empty for none."""
        kind, _, rest = token_owner(self.token).partition("/")
        name, slash, _ = rest.partition("/")
        return name if kind == "TrainingJob" and slash else ""

    @property
    def is_suspended(self) -> bool:
        """Whether it was resized to 0; its instances may still be leaving."""
        return self.wanted == 0 and not self.has_ended

    @property
    def is_disrupted(self) -> bool:
        """Whether it has failed by disruptions alone, so that it may succeed when it is submitted again."""
        limit = self.most_disruptions
        return (
            self.phase == "failed"
            and limit is not None
            and any(instance.disruptions > limit for instance in self.instances)
        )

    @property
    def failed_permanently(self) -> bool:
        """Whether it has failed for its spec or input, so that submitting it again is pointless.

        For elastic trainers, given-up instances count only if no other instance exited with an error. An import that
        fails counts as wrong input.
        """
        if self.phase == "failed" and not self.is_disrupted and _IMPORT_ERROR.match(exception_line(self.last_lines)):
            return True
        failed = [instance for instance in self.instances if instance.phase == "failed"]
        errors = [instance for instance in failed if not instance.given_up and (instance.exit_code or 0) > 0]
        deciding = errors if self.elastic and errors else failed
        return self.invalid_spec or any(instance.exit_code in (EX_CONFIG, EX_DATAERR) for instance in deciding)


def training_job_owner(name: str, uid: str) -> str:
    """Return the owner of the job that is made for a TrainingJob."""
    return f"TrainingJob/{name}/{uid}"


def token_owner(token: str) -> str:
    """Return the OWNER of a token "OWNER/TRY", the same for all tries of a task; empty for other tokens."""
    return token.rpartition("/")[0]


def check_owner(job: JobStatus | None, token: str) -> None:
    """Raise OwnedElsewhereError if `job` has not ended and `token` is of another owner."""
    if job and not job.has_ended and (owner := token_owner(job.token)) not in ("", token_owner(token)):
        raise OwnedElsewhereError(job.name, job.kind, owner)


_IMPORT_ERROR = re.compile(r"(ModuleNotFound|Import|Syntax|Indentation|Tab)Error: ")


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of an instance's output, without its newline. `pod`: whose, empty for a process."""

    instance: int
    text: str
    pod: str = ""


class NodeCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """A node: its `total` resources, by the names of `Scaling.resources`, and what of them is `free`.

    - `total`: of a closed node, which takes no new instances, what its instances and other pods reserve.
    - `free`: what no instance or other pod reserves; instances that are leaving count as gone.
    - `closed_total`: of a closed node, all that it has, as if it were open; None of an open one.
    - `labels`: None for this machine or a quota, which match any node selector.
    - `taints`: those with effect "NoSchedule" or "NoExecute". See `edl_runtime.backends.placement`.
    """

    name: str
    total: dict[str, float]
    free: dict[str, float]
    labels: dict[str, str] | None = None
    taints: tuple[dict[str, str], ...] = ()
    closed_total: dict[str, float] | None = None


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Resources for instances.

    - `nodes`: sorted by name.
    - `quota_total`, `quota_left`: limits of all instances together, and what is left of them, where instances without
      a node or that are leaving count as gone. Empty if there is no quota.
    - `only_node`: where the backend may not list nodes, the name of the one in `nodes` that represents all of them and
      has the quota's resources; see `place_of`.
    """

    nodes: tuple[NodeCapacity, ...]
    quota_total: dict[str, float] = {}
    quota_left: dict[str, float] = {}
    only_node: str = ""

    @property
    def total(self) -> dict[str, float]:
        return _sums(node.total for node in self.nodes)

    @property
    def open_total(self) -> dict[str, float]:
        """As `total`, as if no node were closed."""
        return _sums(node.total if node.closed_total is None else node.closed_total for node in self.nodes)

    @property
    def closed_nodes(self) -> tuple[NodeCapacity, ...]:
        return tuple(node for node in self.nodes if node.closed_total is not None)

    @property
    def free(self) -> dict[str, float]:
        return _sums(node.free for node in self.nodes)

    def place_of(self, instance: InstanceStatus) -> str:
        """Return the name in `nodes` of the instance's node: `only_node` if that is set, empty for none.

        Empty for an instance that is leaving, too: its resources count as free.
        """
        return "" if instance.leaving else instance.node and (self.only_node or instance.node)


def _sums(quantities: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total = Counter[str]()
    for each in quantities:
        total.update(each)
    return dict(total)


class Backend(Protocol):
    """Where instances run. All methods are idempotent."""

    @property
    def place(self) -> str:
        """Where that is, among those that share a Redis: a Kubernetes namespace's name, or a work folder's path."""
        ...

    async def submit(
        self, spec: JobSpec, *, token: str, secrets: Mapping[str, str], origin: Origin | None = None
    ) -> JobStatus:
        """Get or create the job `spec.name` and set its `token`, "OWNER/TRY" or any other text; see `token_owner`.

        A job of that name with the same spec that runs or has succeeded is adopted. Any other is stopped first, down
        to its last process. `secrets`: environment variables that are in no spec, status or file. `origin`: whose the
        job is from now on.

        Raises OwnedElsewhereError if a job of another owner runs; SubmitError when the job can't be started.
        """
        ...

    async def get(self, name: str) -> JobStatus:
        """Raises UnknownJobError."""
        ...

    async def list(self) -> list[JobStatus]:
        """Return all jobs and pools, by name."""
        ...

    async def resize(self, name: str, instances: int, *, token: str | None = None, reason: str = "") -> JobStatus:
        """Request another number of instances. Returns when the request is recorded.

        The highest index leaves first, by SIGTERM and its grace period. 0 is always allowed and suspends the job: it is
        pending until it is resized again. A larger number also starts instances again that had been given up.
        `token`: resize only a job that has it. `reason`: why, for people; it is the reason of a job that this suspends.

        Raises UnknownJobError; JobReplacedError for another token; SpecError outside the bounds; BackendError for a job
        that has ended, and for a size that Kueue does not allow, see `Scaling.queue`.
        """
        ...

    def logs(
        self, name: str, *, instance: int | None = None, tail: int | None = None, follow: bool = False
    ) -> AsyncGenerator[LogLine, None]:
        """Yield the output of all instances, or of one `instance`; of a deleted job, too. Raises UnknownJobError.

        `tail`: only the last lines of each. `follow`: also what they write until the job ends.
        """
        ...

    async def owner(self, name: str) -> str:
        """Return the OWNER of the job whose `logs` there are, empty for none. Raises UnknownJobError."""
        ...

    async def delete(self, name: str, *, token: str | None = None) -> bool:
        """Stop the job, down to its last process, and remove it; its logs are kept. Return whether there was one.

        `token`: delete only a job that has it, so that the kill of an earlier try can't hit a later one.
        """
        ...

    async def evacuate(self, jobs: Collection[str] | None = None) -> builtins.list[str]:
        """Have instances leave nodes that are about to go, so that others start elsewhere; return what was done.

        That is in words, for people. `jobs`: whose instances, by default all. Nobody leaves where no node says that it
        goes, or nodes can't be read. Repeat it: a pool's teachers leave one by one, and the pods of suspended jobs are
        only removed by this once they have left.
        """
        ...

    async def capacity(self) -> Capacity:
        """Raises BackendError where the capacity can't be read, which names the missing role."""
        ...
