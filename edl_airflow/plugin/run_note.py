"""The note of a DAG run: what its trainings have come to, in Markdown. A listener in the process that ends the run.

It replaces no note that a user has written. Every process of Airflow imports this module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from airflow.listeners import hookimpl

from edl_airflow.plugin.log_lines import shown_text
from edl_runtime.errors import counted

if TYPE_CHECKING:
    from airflow.models.dagrun import DagRun
    from sqlalchemy.orm import Session

MOST_CHARACTERS = 1000
"""Of a note, in Airflow."""

HEADING = "**Elastic deep learning**"
OURS = "Edl"
"""In the names of our operators. Other tasks' results, which may be large, are not read."""

MOST_METRICS = 4
MOST_OF_TEXT = 300
MOST_RESULTS = 500

log = logging.getLogger(__name__)


@hookimpl
def on_dag_run_success(dag_run: DagRun, msg: str) -> None:  # noqa: ARG001 (Airflow's signature)
    """Write the run's note."""
    write_note(dag_run)


@hookimpl
def on_dag_run_failed(dag_run: DagRun, msg: str) -> None:  # noqa: ARG001 (Airflow's signature)
    """Write the run's note; what has succeeded of it is worth knowing, too."""
    write_note(dag_run)


def write_note(dag_run: DagRun) -> None:
    """Set a run's note, in the session of the run, if tasks of ours have left results. Never raises.

    That session is the scheduler's, and holds the run's end. So all of it happens in a savepoint, behind which a
    statement that fails leaves the session as it was; and by statements, not by a change of `dag_run`, which would
    fail when the session is committed. The savepoint is the connection's: the scheduler forbids commits of its
    session, and takes the end of a session's own savepoint for one. In SQLite a failed statement changes nothing
    else anyway, and a savepoint would begin a transaction by reading, which can't write once another process has.
    """
    from sqlalchemy.orm import object_session

    try:
        session = object_session(dag_run)
        if session is None:
            return
        connection = session.connection()
        savepoint = nullcontext() if connection.dialect.name == "sqlite" else connection.begin_nested()
        with session.no_autoflush, savepoint:
            _write(session, dag_run)
        session.expire(dag_run, ["dag_run_note"])
    except Exception:  # a note must not end a run in another way
        log.exception("No note for run %s of %s", dag_run.run_id, dag_run.dag_id)


def _write(session: Session, dag_run: DagRun) -> None:
    from airflow.models.dagrun import DagRunNote
    from sqlalchemy import insert, select, update

    table = DagRunNote.__table__
    there = session.execute(select(table.c.user_id, table.c.content).where(table.c.dag_run_id == dag_run.id)).first()
    if is_ours(there) and (text := note_of(_results(session, dag_run))):
        change = update(table).where(table.c.dag_run_id == dag_run.id) if there else insert(table)
        session.execute(change.values(dag_run_id=dag_run.id, content=text))


def is_ours(note: Any | None) -> bool:
    """Whether a run has no note, or one of an earlier end that no user has changed."""
    return note is None or (note.user_id is None and str(note.content or "").startswith(HEADING))


def note_of(results: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the note of these results of tasks, by task; empty if none is a training's or a rescaling's. Pure."""
    lines = [f"- {_code(task)}: {line}" for task, result in results if (line := _line(result))]
    if not lines:
        return ""
    text = HEADING + "\n"
    for number, line in enumerate(lines):
        left = len(lines) - number
        more = f"\n- … and {left} more"
        if len(text) + 1 + len(line) + (len(more) if left > 1 else 0) > MOST_CHARACTERS:
            return text + more
        text += f"\n{line}"
    return text


def _line(result: Mapping[str, Any]) -> str:
    if isinstance(result.get("targets"), list) and "capacity" in result:
        changed = sum(one["target"] != one["instances"] for one in result["targets"])
        dry = "would resize" if result.get("dry_run") else "has resized"
        return f"{dry} {changed} of {len(result['targets'])} jobs and pools"
    if not {"job", "checkpoint", "metrics"} <= result.keys():
        return ""
    single = [each for each in dict(result["metrics"] or {}).items() if isinstance(each[1], int | float | str)]
    metrics = [f"{_code(name)} {_number(value)}" for name, value in single[:MOST_METRICS]]
    size = (
        f"{counted(result['instances'], 'instance')}, {counted(result.get('generations') or 0, 'generation')}"
        if result.get("instances")
        else ""
    )
    step = f"step {result['step']}" if result.get("step") else ""
    stopped = f"stopped: {_code(result.get('reason') or '') or 'asked to'}" if result.get("stopped") else ""
    answered = sum((result.get("answered") or {}).values())
    teachers = f"{answered:,} answers of {counted(len(result['answered']), 'teacher')}" if answered else ""
    not_finite = [f"{_code(name)} not finite since step {at}" for name, at in (result.get("not_finite") or {}).items()]
    checkpoint = f"checkpoint {_code(result['checkpoint'])}" if result["checkpoint"] else "no checkpoint"
    return " · ".join(filter(None, [*metrics, *not_finite[:MOST_METRICS], step, size, teachers, stopped, checkpoint]))


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else _code(shown_text(str(value), 40))


def _code(text: object) -> str:
    """Return a text as Markdown's code, in one line: whatever it says, it is no link and does not end the code."""
    one_line = " ".join(shown_text(str(text), MOST_OF_TEXT).replace("`", "'").split())
    return f"`{one_line}`" if one_line else ""


def _results(session: Session, dag_run: DagRun) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the results of our tasks as they are stored: plain data. Airflow would import classes that others name."""
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.xcom import XCOM_RETURN_KEY, XComModel
    from sqlalchemy import select

    tasks = select(TaskInstance.task_id).where(
        TaskInstance.dag_id == dag_run.dag_id,
        TaskInstance.run_id == dag_run.run_id,
        TaskInstance.operator.contains(OURS),
    )
    query = (
        select(XComModel.task_id, XComModel.map_index, XComModel.value)
        .where(
            XComModel.task_id.in_(tasks),
            XComModel.dag_id == dag_run.dag_id,
            XComModel.run_id == dag_run.run_id,
            XComModel.key == XCOM_RETURN_KEY,
        )
        .order_by(XComModel.timestamp)
        .limit(MOST_RESULTS)
    )
    return [
        (task if index < 0 else f"{task} {index}", value)
        for task, index, value in session.execute(query)
        if isinstance(value, dict)
    ]
