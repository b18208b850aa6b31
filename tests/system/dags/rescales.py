"""A job that waits, and a rescaling DAG that new jobs trigger: see test_rescaling.py."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, Param, task

from edl_airflow.assets import jobs_asset
from edl_airflow.operators.autoscale import EdlAutoscaleOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_runtime.pods import Pod
from edl_runtime.specs import TrainerSpec

GO = Path(os.environ.get("AIRFLOW_HOME", "")).parent / "go"
CONN_ID = "edl_rescaled"
WAITS = f"import os, time\nwhile not os.path.exists({str(GO)!r}): time.sleep(0.2)"

with DAG("submits", schedule=None, params={"job": "first"}):
    EdlTrainOperator(
        task_id="train",
        job="{{ params.job }}",
        trainer=TrainerSpec(command=("python", "-c", WAITS), pod=Pod(resources={"cpu": "1m"})),
        trainers="1:3",
        deferrable=True,
        edl_conn_id=CONN_ID,
    )

WINDOWS = """
windows:
  - {name: always, start: 00:00, end: 24:00, sizes: {cluster: {cpu: {{ params.cpus }}}}}
"""

with DAG(
    "rescales",
    schedule=[jobs_asset(CONN_ID)],
    params={"cpus": Param(0.0035, type="number")},
    max_active_runs=2,
    default_args={"retries": 1, "retry_delay": timedelta(seconds=1)},
):
    rules: dict[str, Any] = {"windows": WINDOWS, "edl_conn_id": CONN_ID}
    rescale = EdlAutoscaleOperator(task_id="rescale", trigger_rule="none_failed_min_one_success", **rules)
    dry_run = EdlAutoscaleOperator(task_id="dry_run", dry_run=True, **rules)
    approve = ApprovalOperator(
        task_id="approve",
        subject="Shrink jobs or pools?",
        body="{% for one in ti.xcom_pull('dry_run').targets if one.target < one.instances %}"
        "- {{ one.name }} {{ one.reason }}\n{% endfor %}",
    )

    @task.branch
    def needs_approval(plan: dict[str, Any]) -> str:
        shrinks = any(one["target"] < one["instances"] for one in plan["targets"])
        return "approve" if shrinks else "rescale"

    needs_approval(dry_run.output) >> [approve, rescale]
    approve >> rescale
