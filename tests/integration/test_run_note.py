"""The note of a DAG run, written in the session that ends the run, as the scheduler does."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from edl_airflow.plugin import run_note

with warnings.catch_warnings():  # of what Airflow's own imports drag in
    warnings.simplefilter("ignore")
    from airflow.models.dagrun import DagRun, DagRunNote
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.xcom import XComModel
    from airflow.utils.sqlalchemy import prohibit_commit
    from airflow.utils.types import DagRunType
    from sqlalchemy import delete, event, insert, select, text
    from sqlalchemy.orm import Session

NIGHT = {"job": "night", "checkpoint": "/m", "metrics": {"accuracy": 0.9}, "answered": {"a:1": 7}}
NOTE = "**Elastic deep learning**\n\n- `train`: `accuracy` 0.9 · 7 answers of 1 teacher · checkpoint `/m`"
FOREIGN = '{"__classname__": "airflow.absent.Thing", "__version__": 1, "__data__": {}}'


@pytest.fixture
def session(airflow_database: Any) -> Iterator[Session]:
    """A session of Airflow's database; afterwards that is empty."""
    with airflow_database.session_factory() as made:
        yield made
        made.rollback()
        for model in (XComModel, DagRunNote, TaskInstance, DagRun):
            made.execute(delete(model))
        made.commit()


def begun(session: Session, *results: object, note: Any = None) -> DagRun:
    """Return a run that is to end. `results`: of its tasks, the first of which is "train"."""
    now = datetime.now(UTC)
    run = DagRun(dag_id="nightly", run_id="manual__1", run_type=DagRunType.MANUAL, state="running", run_after=now)
    run.note = note
    session.add(run)
    session.flush()
    for task_id, result in zip(("train", "other", "third"), results, strict=False):
        named = {"dag_id": "nightly", "run_id": "manual__1", "task_id": task_id, "map_index": -1}
        about = {"operator": "EdlTrainOperator", "pool": "default_pool", "pool_slots": 1, "try_number": 1}
        session.execute(insert(TaskInstance).values(id=uuid.uuid4(), **named, **about))
        session.execute(insert(XComModel).values(dag_run_id=run.id, key="return_value", value=result, **named))
    session.commit()
    return run


def end(session: Session, run: DagRun) -> tuple[str, str | None]:
    """End the run as the scheduler does; return its state and note as others see them afterwards."""
    with prohibit_commit(session) as guard:
        run.state = "success"
        run_note.on_dag_run_success(run, "success")
        guard.commit()
    session.expire_all()
    return session.scalar(select(DagRun.state)), session.scalar(select(DagRunNote.content))


@contextmanager
def rolled_back(session: Session) -> Iterator[list[str]]:
    """Collect the savepoints that are rolled back to."""
    seen: list[str] = []
    engine = session.get_bind()

    def note(_: Any, name: str, *__: Any) -> None:
        seen.append(name)

    event.listen(engine, "rollback_savepoint", note)
    yield seen
    event.remove(engine, "rollback_savepoint", note)


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, NOTE), ((f"{run_note.HEADING}\n\n- older",), NOTE), (("mine", "1"), "mine"), (("mine",), "mine")],
    ids=["none", "of an earlier end", "a user's", "a DAG's"],
)
def test_a_run_ends_with_a_note_of_its_results(session: Session, before: Any, after: str) -> None:
    """A note of others stays."""
    assert end(session, begun(session, NIGHT, note=before)) == ("success", after)


def test_results_that_are_not_ours_import_nothing(session: Session) -> None:
    """An object of a class that Airflow would look for is left out."""
    assert end(session, begun(session, NIGHT, FOREIGN, [1])) == ("success", NOTE)


@pytest.mark.parametrize(
    "fault",
    [
        "UPDATE xcom SET value = '{'",
        "CREATE TRIGGER fault BEFORE INSERT ON dag_run_note BEGIN SELECT RAISE(ABORT, 'no notes'); END",
        "ALTER TABLE xcom RENAME TO xcom_away",
    ],
    ids=["a value that is no JSON", "the note is refused", "a query fails"],
)
@pytest.mark.parametrize("dialect", ["sqlite", "another"])
def test_a_note_that_fails_does_not_undo_the_end(
    session: Session, monkeypatch: pytest.MonkeyPatch, dialect: str, fault: str
) -> None:
    """What has failed is rolled back alone: on PostgreSQL, the transaction could not be committed otherwise."""
    monkeypatch.setattr(session.get_bind().dialect, "name", dialect)
    run = begun(session, NIGHT)
    session.execute(text(fault))
    session.commit()
    try:
        with rolled_back(session) as savepoints:
            assert end(session, run) == ("success", None)
    finally:
        session.rollback()
        session.execute(text("DROP TRIGGER IF EXISTS fault"))
        if "RENAME" in fault:
            session.execute(text("ALTER TABLE xcom_away RENAME TO xcom"))
        session.commit()
    assert len(savepoints) == (dialect != "sqlite")
