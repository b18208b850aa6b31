"""Which mistakes in mapped tasks are found when a DAG file is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.exceptions import AirflowClusterPolicyViolation
from airflow.sdk import DAG, task
from airflow.serialization.serialized_objects import DagSerialization
from support.airflow.templates import STUDENT

from edl_airflow.cluster_policy import known_arguments, task_policy
from edl_airflow.operators.resize import EdlResizeOperator
from edl_airflow.operators.train import EdlTrainOperator
from edl_airflow.sensors.job import EdlJobSensor


@task
def upstream() -> list[Any]:
    return []


def train(**given: Any) -> Any:
    return EdlTrainOperator.partial(task_id="each", **given)


@pytest.mark.parametrize(
    ("mapped", "logged"),
    [
        (lambda: train().expand(trainer=["python x"]), "trainer: got 'python x'"),
        (lambda: train().expand(trainer={"command": ["python", "x"]}), r"trainer: got \('command'"),
        (lambda: train().expand(trainer=[{"comand": 1}]), "trainer: got 'comand'"),
        (lambda: train().expand(trainer=[STUDENT, STUDENT, 7], job=["a", "b"]), "trainer: got 7"),
        (lambda: train(trainer=STUDENT).expand(trainers=["3:1"]), "trainers: got '3:1'"),
        (lambda: train(trainer=STUDENT, trainers="3:1").expand(job=["a"]), "trainers: got '3:1'"),
        (lambda: train(priority="x").expand(trainer=upstream()), "priority: got 'x'"),
        (lambda: train(trainer=STUDENT).expand(job=upstream(), priority=["x"]), "priority: got 'x'"),
        (lambda: train().expand_kwargs([{"trainer": STUDENT}, {"trainer": "python x"}]), "trainer: got 'python x'"),
        (lambda: train().expand_kwargs([upstream(), {"trainer": upstream(), "weight": 0}]), "weight: got 0"),
        (lambda: train().expand(job=["a"]), "missing keyword argument 'trainer'"),
        (lambda: EdlResizeOperator.partial(task_id="each", instances=2).expand(job=["a", "B!"]), "job: got 'B!'"),
        (lambda: EdlJobSensor.partial(task_id="each", phase="gone").expand(job=["a"]), "phase: got 'gone'"),
    ],
)
def test_a_mistake_in_what_is_written_there_is_found(mapped: Callable[[], Any], logged: str) -> None:
    """And the task is named, for the line is not known any more."""
    with DAG("nightly", schedule=None):
        each = mapped()
    with pytest.raises(AirflowClusterPolicyViolation, match=rf"^task 'each': {logged}"):
        task_policy(each)


class Own(EdlTrainOperator):
    """Asks at its making for what is not there when a DAG file is read."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        raise LookupError


@pytest.mark.parametrize(
    "mapped",
    [
        lambda: train(priority=2).expand(trainer=upstream()),
        lambda: train(trainer=STUDENT).expand(priority=upstream(), trainers=["3:1"]),
        lambda: train(priority="x").expand_kwargs(upstream()),
        lambda: train(trainer=STUDENT).expand(trainers=["1:{{ params.high }}", 2], job=["a", "b", "c"]),
        lambda: train().expand(trainer=upstream().map(lambda given: given)),
        lambda: train(trainer=STUDENT).expand(job=[], trainers=["3:1"]),
        lambda: Own.partial(task_id="each").expand(trainer=[STUDENT]),
        lambda: task(lambda n: n).partial().expand(n=[1]),
        lambda: EdlTrainOperator(task_id="one", trainer=STUDENT),
    ],
)
def test_what_may_work_is_left_to_the_task_and_as_it_was(mapped: Callable[[], Any]) -> None:
    """So is what upstream tasks have to say first, and tasks that are not ours."""
    with DAG("nightly", schedule=None) as dag:
        mapped() >> upstream()
    before = DagSerialization.to_dict(dag)
    for one in dag.tasks:
        task_policy(one)
    assert DagSerialization.to_dict(dag) == before


def test_each_value_is_looked_at_without_all_that_it_may_meet() -> None:
    """A thousand beside a thousand would be a million operators."""
    with DAG("nightly", schedule=None):
        later = upstream()
    assert list(known_arguments({"a": [1, 2, 3], "b": ["x", "y"], "c": {"k": 0}}, ())) == [
        {"a": 1, "b": "x", "c": ("k", 0)},
        {"a": 2, "b": "y", "c": ("k", 0)},
        {"a": 3, "b": "y", "c": ("k", 0)},
    ]
    assert list(known_arguments({"a": [1, 2], "b": later}, ("b",))) == [{"a": 1, "b": later}, {"a": 2, "b": later}]
    assert list(known_arguments({"a": [1, 2], "b": later}, ("a",))) == []
    assert list(known_arguments([{"a": 1}, later, {"b": later}, {"a": 2}], ("a",))) == [{"a": 1}, {"a": 2}]


@pytest.mark.slow
def test_airflow_asks_when_it_reads_a_dag_file(tmp_path: Path) -> None:
    """And says it as the file's import error. Of ours it has imported nothing else before there is a task of ours."""
    dags = tmp_path / "dags"
    dags.mkdir()
    (dags / "wrong.py").write_text(
        "from airflow.sdk import DAG\n"
        "from edl_airflow.operators.train import EdlTrainOperator\n"
        "with DAG('wrong', schedule=None):\n"
        "    EdlTrainOperator.partial(task_id='each').expand(trainer=['python x'])\n"
    )
    code = """
import json, sys
from airflow.dag_processing.dagbag import DagBag
imported = sorted(name for name in sys.modules if name.startswith("edl_"))
with open("found.json", "w") as file:
    json.dump([imported, list(DagBag("dags").import_errors.values())], file)
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=tmp_path, env={**os.environ, "AIRFLOW_HOME": str(tmp_path)}
    )
    imported, (error,) = json.loads((tmp_path / "found.json").read_text())
    assert set(imported) - {"edl_airflow.provider_info"} == {"edl_airflow", "edl_airflow.cluster_policy"}
    assert error.startswith("AirflowClusterPolicyViolation: task 'each': trainer: got 'python x'")
