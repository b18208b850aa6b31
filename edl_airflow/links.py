"""Links on a task in the Airflow UI, to the plugin's pages.

Airflow shows what lies in a link's XCom. It fills that itself when a worker lets go of the task; `push_links` does it
as soon as the task starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink, conf

from edl_airflow.identity import job_name, pool_name

if TYPE_CHECKING:
    from airflow.sdk import Context

URL_PREFIX = "/edl"
"""Where the plugin's pages are, below Airflow's own base URL."""


class TrainerLogLink(BaseOperatorLink):
    """To the merged log of the instances that the task trains with."""

    name = "Trainers' log"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        return job_log_url(operator.edl_conn_id, operator.job or job_name(ti_key))


class StudentLogLink(TrainerLogLink):
    """To the log of the student that the task trains."""

    name = "Student log"


class ResizedLink(BaseOperatorLink):
    """To the pool, or to the job's log, that the task resizes."""

    name = "Resized"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 (Airflow's signature)
        if operator.job:
            return job_log_url(operator.edl_conn_id, operator.job)
        return pool_url(operator.edl_conn_id, operator.teacher_pool)


class TeacherPoolLink(BaseOperatorLink):
    """To the teachers and students of the task's pool."""

    name = "Teacher pool"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        return pool_url(operator.edl_conn_id, operator.teacher_pool or pool_name(ti_key))


def job_log_url(conn_id: str, job: str) -> str:
    return f"{_base()}/jobs/{quote(conn_id, safe='')}/{quote(job, safe='')}/log"


def pool_url(conn_id: str, pool: str) -> str:
    return f"{_base()}/pools/{quote(conn_id, safe='')}/{quote(pool, safe='')}"


def push_links(operator: Any, context: Context) -> None:
    """Show the task's links from now on."""
    ti = context["ti"]
    for link in operator.operator_extra_links:
        ti.xcom_push(key=link.xcom_key, value=link.get_link(operator, ti_key=ti))


def _base() -> str:
    return conf.get("api", "base_url", fallback="").rstrip("/") + URL_PREFIX
