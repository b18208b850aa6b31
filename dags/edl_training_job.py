"""Runs a TrainingJob manifest of the original EDL as an elastic training."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import yaml
from airflow.sdk import DAG

from edl_airflow.operators.train import EdlTrainOperator

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FOLDER = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "training_job"

MANIFEST = yaml.safe_load((EXAMPLES / "training_job" / "examplejob.yaml").read_text())
TRAINER = MANIFEST["spec"]["trainer"]
TRAINER["workspace"] = str(EXAMPLES / "elastic_train")  # the image has it in /workspace
TRAINER["entrypoint"] += f" --data-dir {FOLDER}/data"

with DAG(
    "edl_training_job",
    description=__doc__,
    schedule=None,
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 1, "retry_delay": timedelta(seconds=10)},
    tags=["edl", "elastic training"],
    doc_md="""
### A TrainingJob, unchanged

`train` runs `examples/training_job/examplejob.yaml` with one to four instances, on digits. Its documentation lists the
manifest's fields that have no meaning any more, or another one. `edl resize`, or the DAG `edl_rescale_by_traffic`,
changes its instances while it trains.

The workspace is the folder beside this file, and not the image's: where jobs are pods, leave that line out.
""",
):
    train = EdlTrainOperator.from_manifest(yaml.safe_dump(MANIFEST), task_id="train", deferrable=True)
