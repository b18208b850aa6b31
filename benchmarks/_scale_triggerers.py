"""Deferred tasks in a real Airflow's database, and its triggerers, for `benchmarks/scale.py`. There is no scheduler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit

from edl_runtime.settings import RuntimeSettings

DAG_ID = "deferred"
HEALTH_CHECK_THRESHOLD_S = 10
"""How long after its last heartbeat a triggerer counts as dead; Airflow's default is 30."""


def airflow_environment(settings: RuntimeSettings, home: Path) -> dict[str, str]:
    """Return the variables of Airflow's commands, with the connection "edl" to the benchmark's cluster and Redis."""
    redis = urlsplit(settings.redis_url)
    extra = {
        "backend": "kubernetes",
        "namespace": settings.namespace,
        "kubernetes_namespace": settings.kube_namespace,
        "kubernetes_conn_id": "cluster",
    }
    connection = {
        "conn_type": "edl",
        "host": redis.hostname,
        "port": redis.port,
        "password": unquote(redis.password or ""),
        "extra": extra,
    }
    return {
        "AIRFLOW__CORE__DAGS_FOLDER": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db?timeout=60",
        "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": str(HEALTH_CHECK_THRESHOLD_S),
        "AIRFLOW_CONN_EDL": json.dumps(connection),
    }


def defer(triggers: Mapping[str, object], home: Path) -> None:
    """Make Airflow's database with a run of a task for each trigger, by the task's name, all of them deferred."""
    home.mkdir(parents=True, exist_ok=True)
    file = home / "deferred.py"
    file.write_text(
        "from airflow.providers.standard.operators.empty import EmptyOperator\nfrom airflow.sdk import DAG\n"
        f"with DAG({DAG_ID!r}, schedule=None):\n"
        f"    for name in {sorted(triggers)}:\n        EmptyOperator(task_id=name)\n"
    )
    subprocess.run(airflow("db", "migrate"), check=True, stdout=sys.stderr)

    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
    from airflow.models.dagbag import DBDagBag
    from airflow.models.dagbundle import DagBundleModel
    from airflow.models.trigger import Trigger
    from airflow.utils.session import create_session
    from airflow.utils.state import DagRunState, TaskInstanceState
    from airflow.utils.types import DagRunTriggeredByType, DagRunType

    with create_session() as session:
        session.add(DagBundleModel(name="dags-folder"))
    sync_bag_to_db(DagBag(file, bundle_name="dags-folder", bundle_path=home), "dags-folder", None)
    now = datetime.now(UTC)
    with create_session() as session:
        dag = DBDagBag().get_latest_version_of_dag(DAG_ID, session=session)
        assert dag
        run = dag.create_dagrun(
            run_id="run",
            run_after=now,
            run_type=DagRunType.MANUAL,
            triggered_by=DagRunTriggeredByType.TEST,
            state=DagRunState.RUNNING,
            session=session,
        )
        for task in run.get_task_instances(session=session):
            row = Trigger.from_object(triggers[task.task_id])
            session.add(row)
            session.flush()
            task.state, task.trigger_id, task.start_date = TaskInstanceState.DEFERRED, row.id, now


def airflow(*words: str) -> Sequence[str]:
    return [sys.executable, "-m", "airflow", *words]


@contextmanager
def triggerer(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a triggerer, the first of its process group; kill that in the end."""
    with log.open("w") as output:
        process = subprocess.Popen(
            airflow("triggerer", "--skip-serve-logs"), stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a triggerer with its children, as a lost machine does."""
    if process.poll() is None:
        os.killpg(process.pid, 9)
        process.wait()


def alive_triggerers() -> int:
    """Return how many triggerers have reported to Airflow that they run."""
    from airflow.jobs.job import Job
    from airflow.utils.session import create_session
    from sqlalchemy import func, select

    with create_session() as session:
        return session.scalar(select(func.count(Job.id)).where(Job.job_type == "TriggererJob")) or 0


def memory_mb(process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Return the resident megabytes of the triggerer's largest process, and how many of them are its own.

    It is forked from its parent, and shares with that what both have imported.
    """
    import psutil

    parent = psutil.Process(process.pid)
    found = [one.memory_full_info() for one in (parent, *parent.children(recursive=True))]
    largest = max(found, key=lambda one: one.rss)
    return {"runner_mb": largest.rss / 1e6, "runner_own_mb": largest.uss / 1e6}
