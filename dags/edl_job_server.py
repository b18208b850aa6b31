"""Changes a training's instances on a schedule, as EDL's JobServer changes its pods."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_airflow.sensors.job import EdlJobSensor
from edl_runtime.specs import Checkpoint, TrainerSpec

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "job_server"
FOLDER = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "job_server"

RUN = '{{ dag_run.run_after.strftime("%Y%m%dt%H%M%S%f") }}'
JOB = f"pods-{RUN}"

with DAG(
    "edl_job_server",
    description=__doc__,
    schedule=None,
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 1, "retry_delay": timedelta(seconds=10)},
    params={
        "data_dir": Param(
            str(ROOT / ".datasets" / "fashion"),
            type="string",
            title="Pictures",
            description="A folder of IDX files, or of class folders of pictures; by default that of `make datasets`.",
        ),
        "rows": Param(2_000, type="integer", minimum=10, title="Pictures for training"),
        "epochs": Param(20, type="integer", minimum=1, maximum=1000, title="Epochs"),
        "pods": Param(2, type="integer", minimum=1, maximum=16, title="Instances", description="At most."),
    },
    tags=["edl", "elastic training"],
    doc_md="""
### Instances that come and go

Airflow takes the JobServer's part, and the connection's backend that of the JobClients. `train` starts with one
instance. Meanwhile `alone` waits until it trains; `join` asks for the others and waits until they train together;
`leave` goes back to one. Where the training has ended before, these are skipped. Where sizes should follow the time of
day or the web's traffic, use `edl_rescale_by_traffic`.

Run `make datasets` first, or give a folder of your own.
""",
):
    train = EdlTrainOperator(
        task_id="train",
        job=JOB,
        trainer=TrainerSpec(
            command=(
                *("python", f"{EXAMPLE}/train.py", "--data_dir={{ params.data_dir }}"),
                *("--rows={{ params.rows | int }}", "--num_epochs={{ params.epochs | int }}"),
            ),
        ),
        trainers="1:{{ params.pods }}",
        checkpoint=Checkpoint(url=f"{FOLDER}/runs/{RUN}/checkpoints", every_s=60),
        deferrable=True,
    )

    alone = EdlJobSensor(task_id="alone", job=JOB, at_least=1, timeout=3600, soft_fail=True, deferrable=True)
    join = EdlResizeOperator(task_id="join", job=JOB, instances="{{ params.pods }}", deferrable=True)
    leave = EdlResizeOperator(task_id="leave", job=JOB, instances=1, wait=False)

    alone >> join >> leave
