"""What a task does outside Airflow, described once, and what came of it.

Both are plain data without secrets: they travel from the worker to the triggerer and back.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import msgspec

from edl_runtime.specs import JobSpec


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A pool to have, a student to run with it, and how long that may take. Times are Unix seconds.

    - `conn_id`: the Airflow connection; its secrets are looked up wherever the work is done.
    - `token`: this try's; nothing that carries another one is ever deleted.
    - `pool`: the pool's name; `pool_job` when this task runs it, None when it is there already.
    - `at_least`: so many teachers must be registered before the student starts (or the pool counts as started).
    - `pool_deadline`: when the wait for teachers is given up; `waits_s` is its length, for messages.
    - `student_job`: None when the pool is all there is to do.
    - `deadline`: when all of it is given up, None for never.
    - `progress_every_s`: seconds between two lines of progress in the task's log, at least.
    """

    conn_id: str
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
      `no_teacher` (the wait limit passed), `timed_out` (the task's time was up) or `taken_over` (by a later try).
    - `teachers`: addresses of the registered teachers, when `ready`.
    - `answered`: batches answered by each teacher, as the student last reported.
    - `permanent`: trying again can't help.
    """

    ended: Literal["ready", "succeeded", "failed", "no_teacher", "timed_out", "taken_over"]
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
    number of batches that each teacher answered, by address.
    """

    job: str
    pool: str
    checkpoint: str
    metrics: dict[str, Any]
    answered: dict[str, int]
