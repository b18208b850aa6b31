"""What Airflow's database knows: task instances, connections, and the audit log. All functions block."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec
from airflow.models.connection import Connection
from airflow.models.log import Log
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from sqlalchemy import select

from edl_airflow.hooks.edl import CONN_TYPE, DEFAULT_CONN_ID
from edl_airflow.identity import owner
from edl_airflow.links import StudentsLink, TeacherPoolLink, TrainersLink

_FROM_ENVIRONMENT = "AIRFLOW_CONN_"

MOST_TASKS = 5_000
"""Task instances of a run that are looked at."""


class TaskKey(msgspec.Struct, frozen=True, kw_only=True):
    """A task instance, or with an empty `task_id` a whole run; with an empty `dag_id` nothing."""

    dag_id: str = ""
    run_id: str = ""
    task_id: str = ""
    map_index: int = -1

    @property
    def id(self) -> str:
        """Of no try."""
        return ""


def tasks_of_tries(try_ids: Collection[str]) -> dict[str, TaskKey]:
    """Return the task instances of these tries, by id; unknown ones are left out."""
    wanted = [found for found in map(_uuid, try_ids) if found]
    if not wanted:
        return {}
    columns = (TaskInstance.id, *_KEY)
    with create_session() as session:
        rows = session.execute(select(*columns).where(TaskInstance.id.in_(wanted))).all()
    return {str(row[0]): _key(row[1:]) for row in rows}


def owners_in(scope: TaskKey) -> tuple[frozenset[str], str]:
    """Return the owners of the jobs of a task instance, or of all those of a run; and the state of the one instance."""
    with create_session() as session:
        query = select(*_KEY, TaskInstance.state).where(
            TaskInstance.dag_id == scope.dag_id, TaskInstance.run_id == scope.run_id
        )
        if scope.task_id:
            query = query.where(TaskInstance.task_id == scope.task_id, TaskInstance.map_index == scope.map_index)
        rows = session.execute(query.limit(MOST_TASKS)).all()
    owners = frozenset(owner(_key(row[:4])) for row in rows)
    return owners, str(rows[0][4] or "") if rows and scope.task_id else ""


class JobLink(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task's link in the UI leads: to a job or pool that it starts, or has started."""

    task: TaskKey
    conn_id: str
    name: str
    is_pool: bool


def links_in(scope: TaskKey) -> tuple[JobLink, ...]:
    """Return a task instance's links to its job and pool, or all of a run's: jobs first, then the oldest."""
    query = select(XComModel.value, XComModel.dag_id, XComModel.run_id, XComModel.task_id, XComModel.map_index).where(
        XComModel.dag_id == scope.dag_id, XComModel.run_id == scope.run_id, XComModel.key.in_(_LINKS_TO_JOBS)
    )
    if scope.task_id:
        query = query.where(XComModel.task_id == scope.task_id, XComModel.map_index == scope.map_index)
    with create_session() as session:
        rows = session.execute(query.order_by(XComModel.timestamp).limit(MOST_TASKS)).all()
    return tuple(sorted((_link(_key(row[1:]), str(row[0])) for row in rows), key=lambda link: link.is_pool))


def edl_connections() -> list[str]:
    """Return the ids of connections of type `edl` in Airflow's database and in the environment, the default one first.

    Those of another secrets backend can't be listed, but can be asked for by id.
    """
    with create_session() as session:
        found = set(session.scalars(select(Connection.conn_id).where(Connection.conn_type == CONN_TYPE)))
    for name, value in os.environ.items():
        if name.startswith(_FROM_ENVIRONMENT) and _is_edl(value):
            found.add(name.removeprefix(_FROM_ENVIRONMENT).lower())
    return sorted(found, key=lambda conn_id: (conn_id != DEFAULT_CONN_ID, conn_id))


def write_audit(event: str, user: str, task: TaskKey, extra: Mapping[str, Any]) -> None:
    """Add an entry to Airflow's audit log."""
    with create_session() as session:
        session.add(
            Log(
                event=event,
                owner=user,
                owner_display_name=user,
                extra=json.dumps(extra),
                dag_id=task.dag_id or None,
                task_id=task.task_id or None,
                run_id=task.run_id or None,
                map_index=task.map_index if task.task_id else None,
            )
        )


_LINKS_TO_JOBS = tuple(link().xcom_key for link in (TrainersLink, StudentsLink, TeacherPoolLink))

_KEY = (TaskInstance.dag_id, TaskInstance.run_id, TaskInstance.task_id, TaskInstance.map_index)


def _key(row: Any) -> TaskKey:
    dag_id, run_id, task_id, map_index = row
    return TaskKey(dag_id=dag_id, run_id=run_id, task_id=task_id, map_index=map_index)


def _link(task: TaskKey, url: str) -> JobLink:
    asked = {name: values[0] for name, values in parse_qs(url.strip('"').partition("?")[2]).items()}
    name = asked.get("job") or asked.get("pool", "")
    return JobLink(task=task, conn_id=asked.get("conn", ""), name=name, is_pool="job" not in asked)


def _uuid(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None


def _is_edl(value: str) -> bool:
    if value.startswith(f"{CONN_TYPE}://"):
        return True
    try:
        found = msgspec.json.decode(value)
    except msgspec.DecodeError:
        return False
    return isinstance(found, dict) and found.get("conn_type") == CONN_TYPE
