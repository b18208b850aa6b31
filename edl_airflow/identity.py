"""Names of a task instance's job and pool, and the token of a try.

The name is the same for every try, so that the try after a lost worker finds the last one's job. The token is
"OWNER/TRY". The owner, "DAG/NAME", is the same for every try: no other task can take the job or pool over, and the DAG
in it decides who may read the job's log. The try differs each time, so that a kill never stops the next try's work. It
begins with what a retry leaves as it is and a clear changes: whoever clears a task wants its work done again.
"""

from __future__ import annotations

import hashlib
import re
from typing import Protocol

from edl_runtime.specs import NAME_LIMIT

_HASH_DIGITS = 10


class TaskInstance(Protocol):
    """The attributes of Airflow's task instance that are used."""

    @property
    def dag_id(self) -> str: ...

    @property
    def task_id(self) -> str: ...

    @property
    def run_id(self) -> str: ...

    @property
    def map_index(self) -> int | None: ...

    @property
    def id(self) -> object: ...


class Try(TaskInstance, Protocol):
    """A task instance as it runs."""

    @property
    def max_tries(self) -> int: ...


def job_name(ti: TaskInstance) -> str:
    """Return the name of this task instance's job: a readable DNS label."""
    return _name(ti, "")


def pool_name(ti: TaskInstance) -> str:
    """Return the name of the pool of this task instance's own student."""
    return _name(ti, "teachers")


def checkpoint_stream(dag_id: str, task_id: str, map_index: int | None = None) -> str:
    """Return the stream of a task's checkpoints, of all its runs: "DAG/TASK", "DAG/TASK/3" for a mapped one."""
    mapped = map_index is not None and map_index >= 0
    return f"{dag_id}/{task_id}/{map_index}" if mapped else f"{dag_id}/{task_id}"


def owner(ti: TaskInstance) -> str:
    """Return the owner of all jobs and pools of this task instance: "DAG/NAME", by the name of its job."""
    return f"{ti.dag_id}/{job_name(ti)}"


def dag_of(owner: str) -> str:
    """Return the DAG's id of an owner; empty for jobs that no task has started."""
    return owner.rpartition("/")[0]


def is_own_name(owner: str, job: str) -> bool:
    """Whether a job's name is made of its task instance, so that no other owner's job has had it."""
    dag_id, _, name = owner.rpartition("/")
    return bool(dag_id) and name == job


def try_token(ti: Try) -> str:
    """Return the try's token, "OWNER/TRY".

    Airflow gives a task instance a new id for each retry and clear, and keeps the id while the task is deferred. When a
    task is cleared that has ended, Airflow raises `max_tries`; a retry leaves it.
    """
    return f"{owner(ti)}/{ti.max_tries}.{ti.id}"


def try_id(token: str) -> str:
    """Return the id of the task instance in a try's token, also of a token without `max_tries`, of earlier versions."""
    return token.rpartition("/")[2].rpartition(".")[2]


def is_retry(token: str, earlier: str) -> bool:
    """Whether these are tokens of tries of one task instance, between which it has not ended and been cleared."""
    return token.rpartition(".")[0] == earlier.rpartition(".")[0]


def _name(ti: TaskInstance, what: str) -> str:
    map_index = -1 if ti.map_index is None else ti.map_index
    identity = "\n".join([ti.dag_id, ti.task_id, ti.run_id, str(map_index), what])
    digits = hashlib.sha256(identity.encode()).hexdigest()[:_HASH_DIGITS]
    words = [ti.dag_id, ti.task_id, str(map_index) if map_index >= 0 else "", what]
    slug = re.sub(r"[^a-z0-9]+", "-", "-".join(filter(None, words)).lower()).strip("-")
    room = NAME_LIMIT - _HASH_DIGITS - 1
    return f"{slug[:room].rstrip('-')}-{digits}" if slug else digits
