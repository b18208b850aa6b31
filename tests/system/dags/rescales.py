"""A job that waits, and a rescaling that a job's coming starts: see test_rescaling.py."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

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
    params={"cpus": Param(0.0035, type="number"), "approve": Param(default=False, type="boolean")},
    max_active_runs=2,
):
    EdlAutoscaleOperator(
        task_id="rescale",
        windows=WINDOWS,
        approve_shrinks="{{ params.approve }}",
        edl_conn_id=CONN_ID,
        retries=1,
        retry_delay=timedelta(seconds=1),
    )
