"""Evaluates each checkpoint of the nightly training as soon as it is saved."""

from __future__ import annotations

import json
import os
import shlex
import sys
from datetime import timedelta
from pathlib import Path

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, Asset, AssetWatcher, Param

from edl_airflow.triggers.checkpoint import EdlCheckpointTrigger

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "elastic_train"
FOLDER = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "elastic_train"

CHECKPOINT = Asset(
    "edl_nightly_checkpoint",
    watchers=[
        AssetWatcher(name="saved", trigger=EdlCheckpointTrigger(stream="edl_nightly_elastic_training/train")),
    ],
)
EVENTS = "triggering_asset_events.values() | map('sort', attribute='timestamp') | map('last')"
"""The newest that led to this run; where several were saved before it began, the others are left out."""

PARAMS = {
    "checkpoint": Param(
        "",
        type="string",
        title="Checkpoint",
        description="The path or URL of one, to be evaluated by hand; empty in runs that a checkpoint has started.",
    ),
}

with DAG(
    "edl_evaluate_on_checkpoint",
    description=__doc__,
    schedule=[CHECKPOINT],
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 1, "retry_delay": timedelta(seconds=10)},
    params=PARAMS,
    tags=["edl", "elastic training"],
    doc_md="""
### A checkpoint starts a run

The asset `edl_nightly_checkpoint` has an event for each checkpoint that `edl_nightly_elastic_training` writes, in
whichever night. The event has the checkpoint's step, URL and metrics; `evaluate` loads it and returns how many of the
held-out digits it names right. A checkpoint that was deleted meanwhile, since only some are kept, is skipped.

Triggered by hand, it evaluates the checkpoint that the form names.
""",
):
    evaluate = BashOperator(
        task_id="evaluate",
        bash_command='echo "metrics in training: $METRICS"\n'
        + shlex.join([sys.executable, f"{EXAMPLE}/evaluate.py", "--data-dir", f"{FOLDER}/data"])
        + ' "${CHECKPOINT:?no checkpoint has started this run, and the form names none}"',
        env={
            "CHECKPOINT": "{{ params.checkpoint or "
            f"({EVENTS} | map(attribute='extra.payload.checkpoint') | first | default('')) }}}}",
            "METRICS": f"{{{{ {EVENTS} | map(attribute='extra.payload.metrics') | first | default({{}}) | tojson }}}}",
        },
        append_env=True,
        skip_on_exit_code=99,
        output_processor=json.loads,
    )
