"""Links from a task in the Airflow UI to the plugin's page.

Airflow shows the URL in a link's XCom, which it writes when the task leaves its worker. `push_links` writes it when the
task starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from airflow.sdk import BaseOperatorLink, conf

from edl_airflow.identity import job_name, pool_name
from edl_airflow.operators.templates import as_flag

if TYPE_CHECKING:
    from airflow.sdk import Context

URL_PREFIX = "/edl"
"""Path of the plugin's page below Airflow's base URL."""


def page_url(**shown: str) -> str:
    """Return the page's URL; `shown`: its `conn` and `job` or `pool`.

    It has no host: users may reach Airflow by another name than that of the option `base_url`, or through a proxy.
    """
    path = urlsplit(conf.get("api", "base_url", fallback="")).path.rstrip("/") + URL_PREFIX
    return f"{path}/?{urlencode(shown)}" if shown else f"{path}/"


class RescalingLink(BaseOperatorLink):
    """To the last rescaling of the task's connection; a dry run has no link."""

    name = "Rescaling"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 (Airflow's signature)
        return "" if as_flag("dry_run", operator.dry_run) else page_url(conn=operator.edl_conn_id)


class TrainersLink(BaseOperatorLink):
    """To the job that the task trains, with its log."""

    name = "Trainers"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        return page_url(conn=operator.edl_conn_id, job=operator.job or job_name(ti_key))


class StudentsLink(TrainersLink):
    """To the student that the task trains, with its log."""

    name = "Students"


class ResizedLink(BaseOperatorLink):
    """To the pool or job that the task resizes."""

    name = "Resized"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 (Airflow's signature)
        shown = {"job": operator.job} if operator.job else {"pool": operator.teacher_pool}
        return page_url(conn=operator.edl_conn_id, **shown)


class TeacherPoolLink(BaseOperatorLink):
    """To the teachers of the task's pool."""

    name = "Teacher pool"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        return page_url(conn=operator.edl_conn_id, pool=operator.teacher_pool or pool_name(ti_key))


def push_links(operator: Any, context: Context) -> None:
    """Show the task's links in the UI now."""
    ti = context["ti"]
    for link in operator.operator_extra_links:
        ti.xcom_push(key=link.xcom_key, value=link.get_link(operator, ti_key=ti))
