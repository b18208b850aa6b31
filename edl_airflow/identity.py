"""A task instance → the names of its job and pool; a try → its token.

The name is the same for every try, so that a try that follows a lost worker finds the job of the last one. The token
is "OWNER/TRY": the owner, "DAG/NAME", is the same for every try, so that no other task can take a job or pool over, and
says whose permissions a job's log needs; the try is another one each time, so that a kill never hits the next try's
work.
"""

from __future__ import annotations

import hashlib
import re
from typing import Protocol

from edl_runtime.specs import NAME_LIMIT

_HASH_DIGITS = 10


class TaskInstance(Protocol):
    """What is read of Airflow's task instance."""

    dag_id: str
    task_id: str
    run_id: str
    map_index: int | None

    @property
    def id(self) -> object: ...


def job_name(ti: TaskInstance) -> str:
    """Return the name of the job that this task instance runs: readable, DNS-safe, the same for every try."""
    return _name(ti, "")


def pool_name(ti: TaskInstance) -> str:
    """Return the name of the pool that this task instance runs for its own student."""
    return _name(ti, "teachers")


def checkpoint_stream(dag_id: str, task_id: str, map_index: int | None = None) -> str:
    """Return where the checkpoints of a task are told, in all its runs: "DAG/TASK", "DAG/TASK/3" for a mapped one."""
    mapped = map_index is not None and map_index >= 0
    return f"{dag_id}/{task_id}/{map_index}" if mapped else f"{dag_id}/{task_id}"


def owner(ti: TaskInstance) -> str:
    """Return who all jobs and pools of this task instance belong to, in every try: "DAG/NAME", of its job."""
    return f"{ti.dag_id}/{job_name(ti)}"


def dag_of(owner: str) -> str:
    """Return the id of the DAG whose task owns a job, by its `owner`; empty for one that no task has started."""
    return owner.rpartition("/")[0]


def try_token(ti: TaskInstance) -> str:
    """Return what only this try carries, "OWNER/TRY"; `edl_runtime.backends.interface.token_owner` reads it.

    Airflow gives a task instance a new id for each retry and clear, and keeps it while the task is deferred.
    """
    return f"{owner(ti)}/{ti.id}"


def _name(ti: TaskInstance, what: str) -> str:
    map_index = -1 if ti.map_index is None else ti.map_index
    identity = "\n".join([ti.dag_id, ti.task_id, ti.run_id, str(map_index), what])
    digits = hashlib.sha256(identity.encode()).hexdigest()[:_HASH_DIGITS]
    words = [ti.dag_id, ti.task_id, str(map_index) if map_index >= 0 else "", what]
    slug = re.sub(r"[^a-z0-9]+", "-", "-".join(filter(None, words)).lower()).strip("-")
    room = NAME_LIMIT - _HASH_DIGITS - 1
    return f"{slug[:room].rstrip('-')}-{digits}" if slug else digits
