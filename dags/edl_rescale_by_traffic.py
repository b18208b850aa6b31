"""Gives all jobs and pools what web traffic leaves them: at each edge, every few minutes, and when jobs come or go."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, AssetOrTimeSchedule, MultipleCronTriggerTimetable, Param

from edl_airflow.assets import jobs_asset
from edl_airflow.operators.autoscale import EdlAutoscaleOperator
from edl_airflow.windows import as_windows

WINDOWS = as_windows(Path(__file__).resolve().with_name("traffic_windows.yaml"))
EVERY = timedelta(minutes=5)
JOBS = jobs_asset()

EDGES = sorted({edge % (24 * 60) for window in WINDOWS.windows for edge in (window.start, window.end)})
"""Minutes of the day at which windows begin and end; on days on which none does, a run more does no harm."""

TIMES = [f"*/{EVERY // timedelta(minutes=1)} * * * *", *(f"{edge % 60} {edge // 60} * * *" for edge in EDGES)]

PARAMS = {
    "dry_run": Param(
        default=False, type="boolean", title="Dry run", description="Show what would be done, and change nothing."
    ),
    "max_load": Param(
        1.0,
        type="number",
        exclusiveMinimum=0,
        maximum=1,
        title="Highest load",
        description="The share of each resource that everything on the nodes together may reserve.",
    ),
    "approve": Param(
        default=False,
        type="boolean",
        title="Approve shrinks",
        description="Ask a person, under Required Actions, before jobs and pools shrink. What can grow grows at once.",
    ),
}

with DAG(
    "edl_rescale_by_traffic",
    description=__doc__,
    schedule=AssetOrTimeSchedule(
        timetable=MultipleCronTriggerTimetable(*TIMES, timezone=WINDOWS.time_zone), assets=[JOBS]
    ),
    catchup=False,
    max_active_runs=3,  # one may wait for a person's answer
    default_args={"retries": 1, "retry_delay": timedelta(seconds=10)},
    params=PARAMS,
    tags=["edl", "traffic"],
    doc_md="""
### Jobs follow the web's traffic

`rescale` makes one pass of the policy over all jobs and pools of the connection `edl_default`: what the web is not
likely to need, as `traffic_windows.yaml` beside this file says, is for training, and is shared out by priority and
weight. Its link *Rescaling* shows what the last pass has decided, and why; its log says the same.

It runs whenever a traffic window begins or ends, every five minutes between, and some seconds after a job was submitted
or has ended: the asset `edl_jobs:edl_default` has an event then. Before a window that leaves less to training, jobs
shrink by the pass before its beginning. A run by hand goes by the window that holds then. Two runs at once do no harm.

The values of the form hold for runs by hand; those of all others are the defaults in this file. With *Approve shrinks*
a person is asked, under *Required Actions*, and what should shrink keeps what it has for an hour, or until somebody
approves.
""",
):
    rescale = EdlAutoscaleOperator(
        task_id="rescale",
        windows=WINDOWS,
        lead_s=EVERY.total_seconds(),
        max_load="{{ params.max_load }}",
        dry_run="{{ params.dry_run }}",
        approve_shrinks="{{ params.approve }}",
    )
