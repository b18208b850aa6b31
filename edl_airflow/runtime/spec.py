"""What a task does outside Airflow (`TaskSpec`) and how that ended (`TaskOutcome`).

Plain data without secrets: they go from the worker to the triggerer and back.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from edl_airflow.results import CheckpointResult, PoolResult, RunningJob, WindowResult
from edl_runtime.backends.interface import Origin
from edl_runtime.pods import Pod
from edl_runtime.progress import Progress
from edl_runtime.settings import KEPT_LOGS
from edl_runtime.specs import JobSpec


class LocalBackendRef(msgspec.Struct, frozen=True, tag="local", tag_field="backend"):
    """The local backend with this folder."""

    work_dir: str


class KubernetesBackendRef(msgspec.Struct, frozen=True, kw_only=True, tag="kubernetes", tag_field="backend"):
    """Pods in a namespace of a cluster.

    - `conn_id`: the Airflow connection of type `kubernetes`; empty for the service account of Airflow's pod.
    - `pod`: defaults for the pods of specs. `kept_logs`: of how many deleted jobs the logs are kept.
    """

    namespace: str
    conn_id: str = ""
    pod: Pod = Pod()
    kept_logs: int = KEPT_LOGS


BackendRef = LocalBackendRef | KubernetesBackendRef
"""The backend of a job, so that the job can be stopped without its `edl` connection."""


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a task: a pool, a training, or both. Times are Unix seconds.

    - `conn_id`: the Airflow connection; its secrets are looked up wherever the work is done.
    - `place`: the backend of its jobs, even if the connection is edited or removed meanwhile.
    - `token`: this try's, "OWNER/TRY"; once started, it deletes only jobs with this token.
    - `origin`: of its jobs, so that they are known as orphans if they are left over.
    - `pool`: the pool's name, empty for none; `pool_job`: the pool's job if this task runs it, None for a running pool.
    - `servers`: addresses of other people's servers that the pool's job registers; then only they count as teachers.
    - `at_least`: how many teachers must be registered before the training starts (or the pool counts as started).
    - `pool_deadline`: the end of the wait for teachers, which takes `wait_timeout_s`. The wait starts again when the
      pool is resized, and does not end while the pool is suspended.
    - `trainer_job`: None for a pool alone.
    - `started`: this try has started or adopted its trainers, so if they are missing, somebody has stopped them.
    - `stream`: the stream of its checkpoints, see `edl_runtime.checkpoint.checkpoint_events`; empty for none.
    - `began_at`: the start of the DAG run; earlier checkpoints are another run's.
    - `ends_at`: when the training is asked to end with a checkpoint, None for never; stopped `stop_grace_s` later.
    - `deadline`: the end of the task's `execution_timeout`, None for none.
    - `progress_every_s`: seconds between two lines of progress, or two batches of the job's output, at least.
    - `all_logs`: the task's log has the output of all instances from the start, not only that of rank 0.
    """

    conn_id: str
    place: BackendRef
    token: str
    origin: Origin | None = None
    pool: str = ""
    pool_deadline: float = 0.0
    wait_timeout_s: float = 0.0
    servers: tuple[str, ...] = ()
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
    all_logs: bool = False

    @property
    def name(self) -> str:
        """The name of the training, else of the pool."""
        return self.trainer_job.name if self.trainer_job else self.pool

    @property
    def jobs(self) -> tuple[str, ...]:
        """The names of the jobs that this task runs."""
        return tuple(job.name for job in (self.trainer_job, self.pool_job) if job)


class TrainingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state that a job's agents have agreed on.

    - `members`: the instances of the current or last generation, by rank; empty while a generation forms.
    - `ended`: finished its training ("done"), was asked to end ("stopped"), or failed; empty before. `reason`: why.
    - `heard_at`: the time of the agents' last report, in Unix seconds.
    """

    members: tuple[int, ...] = ()
    ended: Literal["", "done", "stopped", "failed"] = ""
    reason: str = ""
    heard_at: float = 0.0

    @property
    def instances(self) -> int:
        """How many instances train together."""
        return len(self.members)


class LogPosition(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a job's output is in the task's log, of the run that was created at `created_at`.

    - `lines`: how many, by pod, or by the instance's index where it is a process.
    - `instance`: whose output was shown last, as that of rank 0. `disruptions`: how many, by instance.
    """

    created_at: float
    lines: dict[str, int] = {}
    instance: int = 0
    disruptions: dict[int, int] = {}


class TaskOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How work, or a wait, has ended.

    - `ended`: `ready` (the pool, or what a wait was for, is there), `succeeded` or `failed` (the job `name`), `stopped`
      (its time was over, and it did not end by itself), `too_late` (its time was over before the run began), `gone`
      (the target of a wait has ended), `impossible` (the condition can't become true), `no_teacher` or `not_yet` (the
      wait limit passed), `timed_out` (the task's `execution_timeout` passed) or `taken_over` (by a later try).
    - `teachers`: addresses of the registered teachers, of a pool that is `ready`.
    - `result`: the result that the training script has written.
    - `progress`: the job's last report; `training`: its agents' last state; `generations`: how many it had;
      `checkpoint`: its newest, or the one that a wait was for. None, or 0, if there is none or Redis was away.
    - `window`: the traffic window that a wait was for.
    - `permanent`: a retry can't help, or a person has stopped the job. `transient`: the cluster or the network failed,
      and a retry may help.
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
        "no_pool",
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
    checkpoint: CheckpointResult | None = None
    window: WindowResult | None = None
    reason: str = ""
    last_lines: tuple[str, ...] = ()
    permanent: bool = False
    transient: bool = False

    def pool_result(self) -> PoolResult:
        """Return the result of tasks about a pool."""
        result = PoolResult(pool=self.name, teachers=list(self.teachers))
        return PoolResult(**result, reason=self.reason) if self.reason else result

    def running_job(self) -> RunningJob:
        """Return the result of tasks about a running job."""
        result = RunningJob(job=self.name, instances=self.training.instances if self.training else 0)
        return RunningJob(**result, reason=self.reason) if self.reason else result
