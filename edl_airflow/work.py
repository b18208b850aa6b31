"""What a task does outside Airflow, described once, and what came of it.

Both are plain data without secrets: they travel from the worker to the triggerer and back.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import msgspec

from edl_runtime.specs import JobSpec


class Place(msgspec.Struct, frozen=True):
    """Which backend runs a job, so that it can be found and stopped when its connection can't be looked up."""

    work_dir: str
    backend: Literal["local"] = "local"


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A pool to have, a student to run with it, and how long that may take. Times are Unix seconds.

    - `conn_id`: the Airflow connection; its secrets are looked up wherever the work is done.
    - `place`: where its jobs are, also when the connection is edited or removed meanwhile.
    - `token`: this try's, "OWNER/TRY"; once it has begun, nothing that carries another one is deleted.
    - `pool`: the pool's name; `pool_job` when this task runs it, None when it is there already.
    - `at_least`: so many teachers must be registered before the student starts (or the pool counts as started).
    - `pool_deadline`: when the wait for teachers is given up; `waits_s` is its length, for messages.
    - `student_job`: None when the pool is all there is to do.
    - `deadline`: when all of it is given up, None for never.
    - `progress_every_s`: seconds between two lines of progress in the task's log, at least.
    """

    conn_id: str
    place: Place
    token: str
    pool: str
    pool_deadline: float
    waits_s: float
    at_least: int = 1
    pool_job: JobSpec | None = None
    student_job: JobSpec | None = None
    deadline: float | None = None
    progress_every_s: float = 5.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the work ended.

    - `ended`: `ready` (the pool is there and that was all), `succeeded` or `failed` (a job; `name` says which),
      `gone` (the pool was there and has ended), `no_teacher` (the wait limit passed), `timed_out` (the task's time
      was up) or `taken_over` (by a later try).
    - `teachers`: addresses of the registered teachers, when `ready`.
    - `answered`: requests answered by each teacher, as the student last reported.
    - `permanent`: trying again can't help.
    """

    ended: Literal["ready", "succeeded", "failed", "gone", "no_teacher", "timed_out", "taken_over"]
    name: str
    teachers: tuple[str, ...] = ()
    result: dict[str, Any] | None = None
    answered: dict[str, int] = {}
    reason: str = ""
    last_lines: tuple[str, ...] = ()
    permanent: bool = False


class PoolResult(TypedDict):
    """What a pool's operator and sensor return: the pool's name and its teachers' addresses."""

    pool: str
    teachers: list[str]


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
