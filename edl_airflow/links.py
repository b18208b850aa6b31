"""Links from a task in the Airflow UI to the plugin's pages.

Airflow shows the URL in a link's XCom, which it writes when the task leaves its worker. `push_links` writes it when the
task starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink, conf

from edl_airflow.identity import job_name, pool_name
from edl_airflow.operators.templates import as_flag

if TYPE_CHECKING:
    from airflow.sdk import Context

URL_PREFIX = "/edl"
"""Path of the plugin's pages below Airflow's base URL."""


class PageUrls(NamedTuple):
    """URLs of the pages about a job or pool."""

    conn_id: str
    name: str

    @property
    def job(self) -> str:
        """The job's instances."""
        return f"{_base()}/jobs/{quote(self.conn_id, safe='')}/{quote(self.name, safe='')}"

    @property
    def log(self) -> str:
        """The log of a job or pool; `?instance=` selects one instance."""
        return f"{self.job}/log"

    @property
    def pool(self) -> str:
        """The pool's teachers and students."""
        return f"{_base()}/pools/{quote(self.conn_id, safe='')}/{quote(self.name, safe='')}"


class RescalingLink(BaseOperatorLink):
    """To the last rescaling of the task's connection; a dry run has no link."""

    name = "Rescaling"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 (Airflow's signature)
        return "" if as_flag("dry_run", operator.dry_run) else rescaling_page(operator.edl_conn_id)


class TrainersLink(BaseOperatorLink):
    """To the instances that the task trains with."""

    name = "Trainers"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        return PageUrls(operator.edl_conn_id, operator.job or job_name(ti_key)).job


class StudentsLink(TrainersLink):
    """To the instances of the student that the task trains."""

    name = "Students"


class TrainerLogLink(BaseOperatorLink):
    """To the merged log of the instances that the task trains with."""

    name = "Trainers' log"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        return PageUrls(operator.edl_conn_id, operator.job or job_name(ti_key)).log


class StudentLogLink(TrainerLogLink):
    """To the log of the student that the task trains."""

    name = "Student log"


class ResizedLink(BaseOperatorLink):
    """To the pool, or to the job's instances, that the task resizes."""

    name = "Resized"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 (Airflow's signature)
        if operator.job:
            return PageUrls(operator.edl_conn_id, operator.job).job
        return PageUrls(operator.edl_conn_id, operator.teacher_pool).pool


class TeacherPoolLink(BaseOperatorLink):
    """To the teachers and students of the task's pool."""

    name = "Teacher pool"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        return PageUrls(operator.edl_conn_id, operator.teacher_pool or pool_name(ti_key)).pool


def rescaling_page(conn_id: str) -> str:
    """Return the URL of the last rescaling of a connection."""
    return f"{_base()}/rescaling/{quote(conn_id, safe='')}"


def push_links(operator: Any, context: Context) -> None:
    """Show the task's links in the UI now."""
    ti = context["ti"]
    for link in operator.operator_extra_links:
        ti.xcom_push(key=link.xcom_key, value=link.get_link(operator, ti_key=ti))


def _base() -> str:
    return conf.get("api", "base_url", fallback="").rstrip("/") + URL_PREFIX
