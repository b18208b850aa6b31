"""Gives all jobs and pools what web traffic leaves them: at each edge, every few minutes, and when jobs come or go."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, AssetOrTimeSchedule, MultipleCronTriggerTimetable, Param, task

from edl_airflow.assets import jobs_asset
from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.operators.autoscale import EdlAutoscaleOperator
from edl_airflow.results import RescalingResult
from edl_airflow.traffic_windows import load_windows

WINDOWS = load_windows(Path(__file__).resolve().with_name("traffic_windows.yaml"))

EVERY_MINUTES = 5
"""Minutes between two runs that nothing else calls for: one of 1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30 that divide an
hour."""

MAX_LOAD = 1.0
"""The share of each resource that everything on the nodes together may reserve, above 0, up to 1."""

APPROVE_SHRINKS = False
"""Ask a person, under Required Actions, before a run in which jobs or pools shrink."""

ANSWER_WITHIN = timedelta(minutes=15)
"""No answer by then counts as a refusal."""

CONNECTIONS = [DEFAULT_CONN_ID]
"""Each has a DAG of its own, for the places that they name: a pass is of one place."""

EDGES = sorted({edge % (24 * 60) for window in WINDOWS.windows for edge in (window.start, window.end)})
"""Minutes of the day at which windows begin and end; on days on which none does, a run more does no harm."""

TIMES = [f"*/{EVERY_MINUTES} * * * *", *(f"{edge % 60} {edge // 60} * * *" for edge in EDGES)]

PARAMS = {
    "dry_run": Param(
        default=False, type="boolean", title="Dry run", description="Show what would be done, and change nothing."
    ),
}

for conn_id in CONNECTIONS:
    with DAG(
        "edl_rescale_by_traffic" if conn_id == DEFAULT_CONN_ID else f"edl_rescale_by_traffic_{conn_id}",
        description=__doc__,
        schedule=AssetOrTimeSchedule(
            timetable=MultipleCronTriggerTimetable(*TIMES, timezone=WINDOWS.time_zone), assets=[jobs_asset(conn_id)]
        ),
        catchup=False,
        max_active_runs=1,
        default_args={"retries": 1, "retry_delay": timedelta(seconds=10)},
        params=PARAMS,
        tags=["edl", "traffic"],
        doc_md=f"""
### Jobs follow the web's traffic

`rescale` makes one pass of the policy over all jobs and pools of the connection `{conn_id}`: what the web is not
likely to need, by `traffic_windows.yaml` beside this file, is for training, and is shared out by priority and weight.
Its link *Rescaling* and its log show what the last pass has decided, and why.

It runs whenever a traffic window begins or ends, every five minutes between, and some seconds after a job was
submitted, has ended or has become pending: the asset `edl_jobs:{conn_id}` has an event then. Before a window that
leaves less to training, jobs shrink by the pass before its beginning. A run by hand goes by the window that holds then,
and with *Dry run* only shows what it would do.

What holds for all runs is set at the beginning of this file: which connections have such a DAG (`CONNECTIONS`), how
often it runs (`EVERY_MINUTES`), how much everything together may reserve (`MAX_LOAD`), and whether a person is asked,
under *Required Actions*, before something shrinks (`APPROVE_SHRINKS`). With that, `dry_run` shows what `rescale` would
do. If anything would shrink, `approve` waits for an answer, and so do later runs. After a refusal, or without an answer
within 15 minutes (`ANSWER_WITHIN`), this run changes nothing, and the next one asks again.
""",
    ):
        rules = {"edl_conn_id": conn_id, "windows": WINDOWS, "lead_s": EVERY_MINUTES * 60, "max_load": MAX_LOAD}
        rescale = EdlAutoscaleOperator(
            task_id="rescale", dry_run="{{ params.dry_run }}", trigger_rule="none_failed_min_one_success", **rules
        )

        if APPROVE_SHRINKS:

            @task.branch
            def needs_approval(plan: RescalingResult, params: dict[str, Any]) -> str:
                """Ask only if something would shrink."""
                shrinks = any(one["target"] < one["instances"] for one in plan["targets"])
                return "approve" if shrinks and not params["dry_run"] else "rescale"

            dry_run = EdlAutoscaleOperator(task_id="dry_run", dry_run=True, **rules)
            approve = ApprovalOperator(
                task_id="approve",
                subject="Shrink jobs or pools?",
                body="{% for one in ti.xcom_pull('dry_run').targets if one.target < one.instances %}"
                "- {{ one.name }} {{ one.reason }}\n{% endfor %}",
                defaults="Reject",
                response_timeout=ANSWER_WITHIN,
            )
            needs_approval(dry_run.output) >> [approve, rescale]
            approve >> rescale
