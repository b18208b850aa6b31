"""Links on a task in the Airflow UI, to the plugin's pages.

Airflow shows what lies in a link's XCom. It fills that itself when a worker lets go of the task; `push_links` does it
as soon as the task starts.
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
"""Where the plugin's pages are, below Airflow's own base URL."""


class PageUrls(NamedTuple):
    """Where the pages about a job or pool are."""

    conn_id: str
    name: str

    @property
    def job(self) -> str:
        """Of a job's instances."""
        return f"{_base()}/jobs/{quote(self.conn_id, safe='')}/{quote(self.name, safe='')}"

    @property
    def log(self) -> str:
        """Of a job's log, or a pool's; `?instance=` makes it that of one instance."""
        return f"{self.job}/log"

    @property
    def pool(self) -> str:
        """Of a pool's teachers and students."""
        return f"{_base()}/pools/{quote(self.conn_id, safe='')}/{quote(self.name, safe='')}"


class RescalingLink(BaseOperatorLink):
    """To what the last rescaling of the task's connection has decided; a dry run is none, and has no link."""

    name = "Rescaling"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 (Airflow's signature)
        return "" if as_flag("dry_run", operator.dry_run) else rescaling_page(operator.edl_conn_id)


class TrainersLink(BaseOperatorLink):
    """To the instances that the task trains with: the pods, where they are, and what they wait for."""

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
    """Return where the last rescaling of a connection is shown."""
    return f"{_base()}/rescaling/{quote(conn_id, safe='')}"


def push_links(operator: Any, context: Context) -> None:
    """Show the task's links from now on."""
    ti = context["ti"]
    for link in operator.operator_extra_links:
        ti.xcom_push(key=link.xcom_key, value=link.get_link(operator, ti_key=ti))


def _base() -> str:
    return conf.get("api", "base_url", fallback="").rstrip("/") + URL_PREFIX
