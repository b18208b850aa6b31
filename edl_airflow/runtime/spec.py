"""What a task does outside Airflow (`TaskSpec`) and how it ended (`TaskOutcome`).

Both are plain data without secrets: they travel from the worker to the triggerer and back.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from edl_airflow.results import CheckpointResult, PoolResult, RunningJob, WindowResult
from edl_runtime.pods import Pod
from edl_runtime.progress import Progress
from edl_runtime.specs import JobSpec


class LocalBackendRef(msgspec.Struct, frozen=True, tag="local", tag_field="backend"):
    """Processes of this machine, by the local backend's folder."""

    work_dir: str


class KubernetesBackendRef(msgspec.Struct, frozen=True, kw_only=True, tag="kubernetes", tag_field="backend"):
    """Pods in a namespace of a cluster.

    - `conn_id`: the Airflow connection of type `kubernetes`; empty for the service account of the pod that asks.
    - `pod`: what specs of pods leave open.
    """

    namespace: str
    conn_id: str = ""
    pod: Pod = Pod()


BackendRef = LocalBackendRef | KubernetesBackendRef
"""Which backend runs a job, so that it can be found and stopped when its `edl` connection can't be looked up."""


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a task does: have a pool, or train, or both; and how long that may take. Times are Unix seconds.

    - `conn_id`: the Airflow connection; its secrets are looked up wherever the work is done.
    - `place`: where its jobs are, also when the connection is edited or removed meanwhile.
    - `token`: this try's, "OWNER/TRY"; once it has begun, nothing that carries another one is deleted.
    - `pool`: the pool's name, empty for work without one; `pool_job` when this task runs it, None when it is there
      already.
    - `at_least`: so many teachers must be registered before the training starts (or the pool counts as started).
    - `pool_deadline`: when the wait for teachers is given up; `wait_timeout_s` is its length. It begins anew when the
      pool is resized, and does not end while that is suspended.
    - `trainer_job`: None when the pool is all there is to do.
    - `begun`: this try has started its trainers, or taken them over, so they are not started again: where they are
      missing, somebody has stopped them.
    - `stream`: where its checkpoints are told, see `edl_runtime.checkpoint.checkpoint_events`; empty for nowhere.
    - `began_at`: when the DAG's run has started: a checkpoint that landed before is an earlier run's.
    - `ends_at`: when the training is asked to end with a checkpoint, None for never; `stop_grace_s` after it was first
      asked it is ended.
    - `deadline`: when all of it is given up, None for never.
    - `progress_every_s`: seconds between two lines of progress, or two bunches of the job's own lines, in the task's
      log, at least.
    """

    conn_id: str
    place: BackendRef
    token: str
    pool: str = ""
    pool_deadline: float = 0.0
    wait_timeout_s: float = 0.0
    at_least: int = 1
    pool_job: JobSpec | None = None
    trainer_job: JobSpec | None = None
    started: bool = False
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


class TrainingStatus(msgspec.Struct, frozen=True, kw_only=True):
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


class LogPosition(msgspec.Struct, frozen=True, kw_only=True):
    """How much has been shown of the run of the job that was created at this time.

    Of each instance: how many lines, and how many of the times that the cluster has ended it (`disruptions`).
    """

    created_at: float
    lines: dict[int, int] = {}
    disruptions: dict[int, int] = {}


class TaskOutcome(msgspec.Struct, frozen=True, kw_only=True):
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
    training: TrainingStatus | None = None
    generations: int = 0
    landed: CheckpointResult | None = None
    window: WindowResult | None = None
    reason: str = ""
    last_lines: tuple[str, ...] = ()
    permanent: bool = False
    transient: bool = False

    def pool_result(self) -> PoolResult:
        """Return what tasks about a pool return."""
        result = PoolResult(pool=self.name, teachers=list(self.teachers))
        return PoolResult(**result, reason=self.reason) if self.reason else result

    def running_job(self) -> RunningJob:
        """Return what tasks about a running job return."""
        result = RunningJob(job=self.name, instances=self.training.instances if self.training else 0)
        return RunningJob(**result, reason=self.reason) if self.reason else result
