"""The task of elastic training, made of a TrainingJob of the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from support.airflow.fakes import rendered
from support.airflow.templates import SURROUNDINGS
from support.paths import EXAMPLES

from edl_airflow.operators.train import EdlTrainOperator
from edl_runtime.errors import SpecError
from edl_runtime.pods import Pod
from edl_runtime.specs import Bounds, JobSpec

EXAMPLE = EXAMPLES / "training_job" / "examplejob.yaml"


def manifest(name: str, workspace: str = "src") -> str:
    return f"""
apiVersion: paddlepaddle.org/v1
kind: TrainingJob
metadata: {{name: {name}}}
spec:
  image: registry.example/{name}:1
  fault_tolerant: true
  trainer:
    entrypoint: python train.py
    workspace: {workspace}
    min-instance: 2
    max-instance: 6
  pserver: {{min-instance: 2, max-instance: 2}}
"""


def planned(operator: EdlTrainOperator, context: Any) -> JobSpec:
    """Return the job that the task would run, of a DAG in the folder /dags."""
    dag = DAG("nightly", schedule=None)
    dag.add_task(operator)
    dag.fileloc = "/dags/nightly.py"
    job = rendered(operator, context).plan(context, SURROUNDINGS).trainer_job
    assert job
    return job


def test_the_task_trains_what_the_manifest_says(context: Any) -> None:
    """Its command, environment, bounds and pod; as many instances as there must be at least to begin with."""
    job = planned(EdlTrainOperator.from_manifest(EXAMPLE, task_id="train"), context)
    assert job.command[-4:] == ("python", "train.py", "--epochs", "2")
    assert (job.bounds, job.instances, job.elastic) == (Bounds(1, 4), 1, True)
    assert job.cwd == "/workspace/elastic_train"
    assert job.env["PADDLE_INIT_NUM_PASSES"] == "2"
    assert job.pod == Pod(image="edl-examples:cpu", resources={"cpu": "250m", "memory": "2Gi"})


def test_a_relative_workspace_is_below_the_dags_folder(tmp_path: Path, context: Any) -> None:
    """As any trainer's folder is, wherever the manifest lies; an empty one is none."""
    (tmp_path / "job.yaml").write_text(manifest("digits"))
    for given, cwd in (
        (str(tmp_path / "job.yaml"), "/dags/src"),
        (manifest("digits"), "/dags/src"),
        (manifest("digits", "''"), ""),
    ):
        assert planned(EdlTrainOperator.from_manifest(given, task_id="train"), context).cwd == cwd


def test_what_is_outdated_stands_in_the_tasks_documentation() -> None:
    """Where the DAG's reader sees it; a DAG that is parsed every minute would only fill a log."""
    operator = EdlTrainOperator.from_manifest(manifest("digits"), task_id="train")
    assert operator.doc_md
    assert operator.doc_md.startswith("From the TrainingJob `digits`.\n\n- ")
    assert "- spec.pserver means nothing any more: every trainer holds" in operator.doc_md


def test_what_is_given_beside_the_manifest_comes_first() -> None:
    """Parameters that it has no field for, and others than it says."""
    operator = EdlTrainOperator.from_manifest(
        manifest("digits"), task_id="train", checkpoint="s3://runs/digits", trainers="1:2", doc_md="Ours."
    )
    assert (operator.checkpoint, operator.trainers, operator.doc_md) == ("s3://runs/digits", "1:2", "Ours.")
    assert operator.trainer.command == ("python", "train.py")


def test_one_of_several_is_named() -> None:
    """Without a name, or with another, the error says which there are."""
    both = manifest("digits") + "---" + manifest("letters")
    operator = EdlTrainOperator.from_manifest(both, task_id="train", name="letters")
    assert operator.trainer.env["PADDLE_JOB_NAME"] == "letters"
    for name in ("", "words"):
        with pytest.raises(SpecError, match=rf"name: got '{name}', allowed is one of .* 'digits', 'letters'"):
            EdlTrainOperator.from_manifest(both, task_id="train", name=name)


def test_a_manifest_that_is_none_is_refused_where_the_dag_is_parsed() -> None:
    """The error names the field, or the file."""
    with pytest.raises(SpecError, match=r"spec\.trainer\.min-instance: got 0"):
        EdlTrainOperator.from_manifest(manifest("a").replace("min-instance: 2\n", "min-instance: 0\n"), task_id="train")
    with pytest.raises(SpecError, match=r"manifest: got 'none\.yaml', allowed is a file that can be read"):
        EdlTrainOperator.from_manifest("none.yaml", task_id="train")
