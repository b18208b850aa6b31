"""What a task does outside Airflow, described once, and what came of it.

Both are plain data without secrets: they travel from the worker to the triggerer and back.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from edl_runtime.pods import Pod
from edl_runtime.progress import Progress
from edl_runtime.specs import JobSpec


class LocalPlace(msgspec.Struct, frozen=True, tag="local", tag_field="backend"):
    """Processes of this machine, by the local backend's folder."""

    work_dir: str


class KubernetesPlace(msgspec.Struct, frozen=True, kw_only=True, tag="kubernetes", tag_field="backend"):
    """Pods in a namespace of a cluster.

    - `conn_id`: the Airflow connection of type `kubernetes`; empty for the service account of the pod that asks.
    - `pod`: what specs of pods leave open.
    """

    namespace: str
    conn_id: str = ""
    pod: Pod = Pod()


Place = LocalPlace | KubernetesPlace
"""Which backend runs a job, so that it can be found and stopped when its `edl` connection can't be looked up."""


class LandedCheckpoint(TypedDict):
    """A checkpoint that has landed: what `EdlCheckpointSensor` returns, and an event of `EdlCheckpointTrigger` carries.

    `job`: which one wrote it; `checkpoint`: its URL; `at`: when it was complete, in Unix seconds.
    """

    job: str
    checkpoint: str
    step: int
    epoch: int
    metrics: dict[str, float]
    at: float


class WindowNow(TypedDict):
    """A window that holds, as tasks return it: from `start` to before `end`, in ISO 8601, and what training may have.

    A start or end is None where that is not within 400 days. `sizes` are as in the schema, {} for all there is.
    """

    window: str
    start: str | None
    end: str | None
    sizes: dict[str, Any]


class RescalingTarget(TypedDict):
    """How many `instances` a job or pool was asked to have, how many it should have (`target`), and why."""

    name: str
    kind: str
    instances: int
    target: int
    reason: str


class RescalingResult(TypedDict):
    """What `EdlAutoscaleOperator` returns.

    - `at`: of when it is, and `until`: the end of the traffic window, in Unix seconds; None for none.
    - `window`: the name of the traffic window, "default" between windows, empty without any; `why`: what decides how
      much training may use; `capacity`: that, by resource.
    - `targets`: of each job and pool that can be resized, by name.
    - `refused`: of those that could not be resized, as they have ended meanwhile, by name, why.
    - `waiting`: which jobs and pools would shrink, or shrink further, if somebody approved it.
    - `notes`: what is odd about the windows.
    - `dry_run`: whether nothing was changed.
    """

    at: float
    window: str
    until: float | None
    why: str
    capacity: dict[str, float]
    targets: list[RescalingTarget]
    refused: dict[str, str]
    waiting: list[str]
    notes: list[str]
    dry_run: bool


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a task does: have a pool, or train, or both; and how long that may take. Times are Unix seconds.

    - `conn_id`: the Airflow connection; its secrets are looked up wherever the work is done.
    - `place`: where its jobs are, also when the connection is edited or removed meanwhile.
    - `token`: this try's, "OWNER/TRY"; once it has begun, nothing that carries another one is deleted.
    - `pool`: the pool's name, empty for work without one; `pool_job` when this task runs it, None when it is there
      already.
    - `at_least`: so many teachers must be registered before the training starts (or the pool counts as started).
    - `pool_deadline`: when the wait for teachers is given up; `waits_s` is its length. It begins anew when the pool is
      resized, and does not end while that is suspended.
    - `trainer_job`: None when the pool is all there is to do.
    - `begun`: this try has started its trainers, or taken them over, so they are not started again: where they are
      missing, somebody has stopped them.
    - `stream`: where its checkpoints are told, see `edl_runtime.checkpoint.landed`; empty for nowhere.
    - `began_at`: when the DAG's run has started: a checkpoint that landed before is an earlier run's.
    - `ends_at`: when the training is asked to end with a checkpoint, None for never; `stop_grace_s` after it was first
      asked it is ended.
    - `deadline`: when all of it is given up, None for never.
    - `progress_every_s`: seconds between two lines of progress, or two bunches of the job's own lines, in the task's
      log, at least.
    """

    conn_id: str
    place: Place
    token: str
    pool: str = ""
    pool_deadline: float = 0.0
    waits_s: float = 0.0
    at_least: int = 1
    pool_job: JobSpec | None = None
    trainer_job: JobSpec | None = None
    begun: bool = False
    stream: str = ""
    began_at: float = 0.0
    ends_at: float | None = None
    stop_grace_s: float = 60.0
    deadline: float | None = None
    progress_every_s: float = 5.0

    @property
    def name(self) -> str:
        """Of what the work is mainly about."""
        return self.trainer_job.name if self.trainer_job else self.pool

    @property
    def jobs(self) -> tuple[str, ...]:
        """The names of what this task runs: its trainers, and its pool."""
        return tuple(job.name for job in (self.trainer_job, self.pool_job) if job)


class PoolResult(TypedDict):
    """What a pool's operator and sensor return: the pool's name and its teachers' addresses.

    `reason`: why it has so many, of a resize by traffic windows.
    """

    pool: str
    teachers: list[str]
    reason: NotRequired[str]


class RunningJob(TypedDict):
    """What a job's sensor and resize return: the job's name and how many instances train together.

    `reason`: why it has so many, of a resize by traffic windows.
    """

    job: str
    instances: int
    reason: NotRequired[str]


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's agents have agreed on.

    - `members`: the instances that train together now, or did last, by rank; empty while a generation forms.
    - `ended`: whether it has trained all there is ("done"), was asked to end ("stopped") or has failed; empty before.
      `reason`: who asked, or what failed, and why.
    - `heard_at`: when its agents were last heard of, in Unix seconds.
    """

    members: tuple[int, ...] = ()
    ended: Literal["", "done", "stopped", "failed"] = ""
    reason: str = ""
    heard_at: float = 0.0

    @property
    def instances(self) -> int:
        """How many train together."""
        return len(self.members)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How some work, or a wait, has ended.

    - `ended`: `ready` (what was waited for is there, or a pool, and that was all), `succeeded` or `failed` (a job;
      `name` says which), `stopped` (the time to train was over, and the job did not end by itself), `too_late` (it was
      before the run began), `gone` (what was waited for was there and has ended), `impossible` (what is waited for
      can't be, as asked), `no_teacher` or `not_yet` (the wait limit passed), `timed_out` (the task's time was up) or
      `taken_over` (by a later try).
    - `teachers`: addresses of the registered teachers, when a pool is `ready`.
    - `result`: what the training script left.
    - `progress`: the job's last report; `training`: what its agents agreed on last, the `generations`-th time;
      `landed`: the newest checkpoint that it has left, or that was waited for. None, or 0, if there is none or Redis
      was away.
    - `window`: the traffic window that was waited for.
    - `permanent`: trying again can't help, or nobody wants it, as somebody has stopped the job. `passing`: it was not
      the job's doing, and trying again later may well.
    """

    ended: Literal[
        "ready",
        "succeeded",
        "failed",
        "stopped",
        "too_late",
        "gone",
        "impossible",
        "no_teacher",
        "not_yet",
        "timed_out",
        "taken_over",
    ]
    name: str
    teachers: tuple[str, ...] = ()
    result: dict[str, Any] | None = None
    progress: Progress | None = None
    training: Training | None = None
    generations: int = 0
    landed: LandedCheckpoint | None = None
    window: WindowNow | None = None
    reason: str = ""
    last_lines: tuple[str, ...] = ()
    permanent: bool = False
    passing: bool = False

    def pool_result(self) -> PoolResult:
        """Return what tasks about a pool return."""
        result = PoolResult(pool=self.name, teachers=list(self.teachers))
        return PoolResult(**result, reason=self.reason) if self.reason else result

    def running_job(self) -> RunningJob:
        """Return what tasks about a running job return."""
        result = RunningJob(job=self.name, instances=self.training.instances if self.training else 0)
        return RunningJob(**result, reason=self.reason) if self.reason else result


class JobResult(TypedDict):
    """What `EdlDistillOperator` returns.

    `checkpoint` and `metrics` are what the student left with `edl_runtime.result.write_result`; `answered` is the
    number of requests that each teacher answered, by address.
    """

    job: str
    pool: str
    checkpoint: str
    metrics: dict[str, Any]
    answered: dict[str, int]


class TrainResult(TypedDict):
    """What `EdlTrainOperator` returns.

    - `checkpoint`: what the script left with `edl_runtime.result.write_result`, else the URL of the newest checkpoint
      that this job has written; empty if there is none. `step`, `epoch`: that checkpoint's, or how far the script had
      come if it has left its own.
    - `metrics`: of the newest checkpoint that this job has written, and what the script left.
    - `stopped`: whether it was asked to end, as by `ends_by`, before it had trained all there is; `reason`: why.
    - `instances`: how many trained together at last; `generations`: how many memberships there were.
    """

    job: str
    checkpoint: str
    step: int
    epoch: int
    metrics: dict[str, Any]
    stopped: bool
    reason: str
    instances: int
    generations: int
