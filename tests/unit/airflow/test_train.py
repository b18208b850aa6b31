"""The task of elastic training: what it is given, what it makes of that, and how it ends."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from support.airflow.fakes import FakeClient, deferred_by, event_of, rendered, saved, succeed
from support.airflow.templates import CONNECTION
from support.paths import EXAMPLES

from edl_airflow.deadlines import deadline_of
from edl_airflow.identity import job_name
from edl_airflow.operators.train import EdlTrainOperator
from edl_airflow.results import CheckpointResult
from edl_airflow.runtime.spec import TaskOutcome, TaskSpec, TrainingStatus
from edl_runtime.errors import SpecError
from edl_runtime.pods import Pod, Volume
from edl_runtime.progress import Progress
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, Checkpoint, JobSpec, TrainerSpec

SCRIPT = TrainerSpec(command=("python", "train.py", "{{ run_id }}"), env={"LOW": "{{ params.low }}"})
EVENING = datetime(2026, 1, 31, 22, 0, tzinfo=UTC)


def _train(**changes: Any) -> EdlTrainOperator:
    given: dict[str, Any] = {"task_id": "train", "trainer": SCRIPT, "trainers": "1:3", "deferrable": True}
    return EdlTrainOperator(**{**given, **changes})


def _plan(context: Any, **changes: Any) -> TaskSpec:
    return rendered(_train(**changes), context).plan(context, CONNECTION)


def test_the_job_is_agents_that_run_the_script(context: Any) -> None:
    """Each knows the bounds, the gear, where checkpoints are and the stream for their events."""
    keeps = Checkpoint(url="s3://runs/{{ params.high }}", every_steps=100)
    spec = _plan(context, trainers="{{ params.low }}:{{ params.high }}", gear="warm", checkpoint=keeps)
    job = spec.trainer_job
    assert job
    assert job.command == (
        *("python", "-P", "-m", "edl_runtime.cli", "agent", "--instances", "1:3", "--gear", "warm", "--"),
        *("python", "train.py", "manual__1"),
    )
    assert (job.name, job.kind, job.bounds, job.instances) == (job_name(context["ti"]), "trainer", Bounds(1, 3), 1)
    assert job.elastic
    settings = RuntimeSettings.from_env(job.env)
    assert settings.checkpoint_spec() == Checkpoint(url="s3://runs/3", every_steps=100)
    assert (settings.job, settings.namespace, settings.checkpoint_stream) == (job.name, "team", "nightly/distill")
    assert job.env["LOW"] == "1"
    assert "EDL_REDIS_URL" not in job.env
    assert (spec.stream, spec.pool, spec.ends_at, spec.name) == ("nightly/distill", "", None, job.name)


def test_templates_in_what_a_pod_needs_are_rendered(context: Any) -> None:
    """All else of it comes through as it was."""
    pod = Pod(
        image="registry.example/train:{{run_id}}",
        resources={"gpu": 1, "cpu": "500m"},
        volumes=[Volume(path="/data", claim="digits")],
        template={"spec": {"hostAliases": [{"ip": "10.0.0.1"}]}},
    )
    job = _plan(context, trainer=TrainerSpec(command=("a",), pod=pod)).trainer_job
    assert job
    assert job.pod == msgspec.structs.replace(pod, image="registry.example/train:manual__1")


@pytest.mark.parametrize(
    ("ends_by", "end"),
    [
        ("{{ '07' }}:00", datetime(2026, 2, 1, 7, 0, tzinfo=UTC)),
        (timedelta(hours=2), EVENING + timedelta(hours=2)),
        ("PT2H", EVENING + timedelta(hours=2)),
    ],
)
def test_the_end_is_the_same_in_every_try(ends_by: Any, end: datetime, context: Any) -> None:
    """It follows from when the run has started, and not the task."""
    context["dag_run"] = SimpleNamespace(start_date=EVENING, run_after=EVENING, run_type="scheduled")
    assert _plan(context, ends_by=ends_by).ends_at == end.timestamp()


@pytest.mark.parametrize(("run_type", "late"), [("scheduled", True), ("manual", False), ("backfill", False)])
def test_a_scheduled_run_that_comes_too_late_is_skipped(
    run_type: str,
    late: bool,  # noqa: FBT001
    context: Any,
    site: FakeClient,
) -> None:
    """Its seven o'clock is that of the night that it was for; who starts one by hand means the next one."""
    morning = EVENING + timedelta(hours=9, seconds=5)
    context["dag_run"] = SimpleNamespace(start_date=morning, run_after=EVENING, run_type=run_type)
    spec = _plan(context, ends_by="07:00")
    assert spec.ends_at == (EVENING + timedelta(hours=9 if late else 33)).timestamp()
    if late:
        with pytest.raises(AirflowSkipException, match="the time to train was over before the run began"):
            rendered(_train(ends_by="07:00"), context).execute(context)
        assert site.backend.calls == []


def test_the_first_half_starts_the_training_and_defers(context: Any, site: FakeClient) -> None:
    """It needs no pool; the link to the log is there."""
    deferred_by(rendered(_train(job="digits"), context), context)
    assert site.backend.calls == [("submit", "digits")]
    assert context["ti"].xcoms == {
        "_link_TrainersLink": "/edl/?conn=edl_default&job=digits",
    }


def test_a_training_returns_its_newest_checkpoint(context: Any, site: FakeClient) -> None:
    """The newest checkpoint, its metrics from the script, and how the training has ended."""
    deferred = deferred_by(rendered(_train(job="digits"), context), context)
    ended = TaskOutcome(
        ended="succeeded",
        name="digits",
        result={"checkpoint": "/c/42", "metrics": {"score": 2}, "not_finite": {"loss": 41}},
        progress=Progress(step=43, epoch=4, updated_at=1.0),
        training=TrainingStatus(members=(0, 2), ended="stopped", reason="its time to train is over"),
        generations=3,
        checkpoint=saved(42, job="digits", metrics={"accuracy": 0.9}),
    )
    operator = _train(job="digits")
    assert operator.execute_complete(context, event_of(deferred, ended)) == {
        "job": "digits",
        "checkpoint": "/c/42",
        "step": 42,
        "epoch": 1,
        "metrics": {"accuracy": 0.9, "score": 2},
        "not_finite": {"loss": 41},
        "stopped": True,
        "reason": "its time to train is over",
        "instances": 2,
        "generations": 3,
    }
    succeed(operator, context)
    assert site.backend.jobs == {}


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("before", [None, saved(40, job="digits", metrics={"accuracy": 0.9})])
def test_a_script_that_leaves_a_model_of_its_own_returns_its_own_step(
    context: Any, before: CheckpointResult | None
) -> None:
    """Its step is how far the script came, and not that of the last checkpoint before, if there is one."""
    deferred = deferred_by(rendered(_train(job="digits"), context), context)
    left = {"checkpoint": "/own/model", "metrics": {}}
    progress = Progress(step=43, epoch=4, updated_at=1.0)
    ended = TaskOutcome(ended="succeeded", name="digits", result=left, progress=progress, checkpoint=before)
    result = _train(job="digits").execute_complete(context, event_of(deferred, ended))
    assert (result["checkpoint"], result["step"], result["epoch"], result["stopped"]) == ("/own/model", 43, 4, False)
    assert result["metrics"] == (before["metrics"] if before else {})


def test_one_that_does_not_end_is_ended_by_force(context: Any, site: FakeClient) -> None:
    """The task goes well if there is a checkpoint of this night, and says so; else it fails, and no retry is made."""
    deferred = deferred_by(rendered(_train(job="digits"), context), context)
    stopped = TaskOutcome(ended="stopped", name="digits", reason="it did not end", checkpoint=saved(7, job="digits"))
    result = _train(job="digits").execute_complete(context, event_of(deferred, stopped))
    assert (result["stopped"], result["reason"], result["step"]) == (True, "it did not end", 7)
    assert site.backend.jobs == {}
    with pytest.raises(AirflowFailException, match="it has left no checkpoint"):
        _train(job="digits").execute_complete(
            context, event_of(deferred, msgspec.structs.replace(stopped, checkpoint=None))
        )


BERLIN = ZoneInfo("Europe/Berlin")  # an hour ahead in winter, two in summer


@pytest.mark.parametrize(
    ("start", "ends_by", "end"),
    [
        ("2026-01-31T22:00Z", "07:00", "2026-02-01T06:00Z"),
        ("2026-01-31T22:00Z", "7:00", "2026-02-01T06:00Z"),
        ("2026-01-31T22:00Z", "23:30:15", "2026-01-31T22:30:15Z"),
        ("2026-01-31T22:00Z", "23:00", "2026-02-01T22:00Z"),
        ("2026-01-31T22:00Z", timedelta(hours=9), "2026-02-01T07:00Z"),
        ("2026-01-31T22:00Z", "PT9H", "2026-02-01T07:00Z"),
        ("2026-01-31T22:00Z", "PT1M30S", "2026-01-31T22:01:30Z"),
        ("2026-01-31T22:00Z", "2026-02-01T07:00", "2026-02-01T06:00Z"),
        ("2026-01-31T22:00Z", "2026-02-01T07:00+02:00", "2026-02-01T05:00Z"),
        ("2026-01-31T22:00Z", datetime(2026, 2, 1, 7, 0, tzinfo=UTC), "2026-02-01T07:00Z"),
        ("2026-01-31T22:00Z", "2026-01-01T00:00Z", "2026-01-01T00:00Z"),
        ("2026-01-31T22:00Z", "2026-01-31 22:00:00.5+00:00", "2026-01-31T22:00:00.5Z"),
        ("2026-02-01T05:59Z", "07:00", "2026-02-01T06:00Z"),
        ("2026-03-28T21:00Z", "07:00", "2026-03-29T05:00Z"),  # the night of 23 hours
        ("2026-03-28T21:00Z", "2026-03-29T07:00", "2026-03-29T05:00Z"),
        ("2026-10-24T20:00Z", "07:00", "2026-10-25T06:00Z"),  # the one of 25
        ("2026-10-24T20:00Z", "2026-10-25T07:00", "2026-10-25T06:00Z"),
        ("2026-10-25T01:20Z", "02:45", "2026-10-25T01:45Z"),  # 02:20 for the second time
        ("2026-10-25T00:50Z", "02:10", "2026-10-25T01:10Z"),  # 02:50 for the first time
        ("2026-10-24T22:00Z", "02:10", "2026-10-25T00:10Z"),
        ("2026-10-25T01:10Z", "02:10", "2026-10-26T01:10Z"),
        ("2026-03-28T22:00Z", "02:30", "2026-03-29T01:30Z"),  # is 03:30, for there is no 02:30
    ],
)
def test_when_it_ends(start: str, ends_by: object, end: str) -> None:
    """The next such time in the DAG's zone after the run has started, so long after that, or just then."""
    assert deadline_of(ends_by, start=datetime.fromisoformat(start), zone=BERLIN) == datetime.fromisoformat(end)


def test_a_time_of_day_counts_from_when_the_run_was_to_start() -> None:
    """So it has passed for one that starts too late; a duration begins with the run."""
    morning = datetime(2026, 2, 1, 7, 0, 5, tzinfo=UTC)
    assert deadline_of("07:00", start=morning, due=EVENING) == datetime(2026, 2, 1, 7, 0, tzinfo=UTC)
    assert deadline_of("PT9H", start=morning, due=EVENING) == morning + timedelta(hours=9)


@pytest.mark.parametrize(
    "ends_by",
    [
        "",
        "soon",
        "25:00",
        "7",
        timedelta(0),
        "PT0S",
        "PT",
        7,
        None,
        "20260101",
        "2026-W01",
        "2026-01-31",
        "20260131T0700",
    ],
)
def test_what_means_no_moment_is_refused(ends_by: object) -> None:
    """The error names the field."""
    with pytest.raises(SpecError, match="ends_by"):
        deadline_of(ends_by, start=EVENING)


EXAMPLE = EXAMPLES / "training_job" / "examplejob.yaml"


def manifest(name: str) -> str:
    return f"""
apiVersion: paddlepaddle.org/v1
kind: TrainingJob
metadata: {{name: {name}}}
spec:
  image: registry.example/{name}:1
  fault_tolerant: true
  trainer:
    entrypoint: python train.py
    workspace: src
    min-instance: 2
    max-instance: 6
  pserver: {{min-instance: 2, max-instance: 2}}
"""


def of_manifest(operator: EdlTrainOperator, context: Any) -> JobSpec:
    """Return the job that the task would run, of a DAG in the folder /dags."""
    dag = DAG("nightly", schedule=None)
    dag.add_task(operator)
    dag.fileloc = "/dags/nightly.py"
    job = rendered(operator, context).plan(context, CONNECTION).trainer_job
    assert job
    return job


def test_the_task_trains_what_the_manifest_says(context: Any) -> None:
    """Its command, environment, bounds and pod; as many instances as there must be at least to begin with."""
    job = of_manifest(EdlTrainOperator.from_manifest(EXAMPLE, task_id="train"), context)
    assert job.command[-4:] == ("python", "train.py", "--epochs", "2")
    assert (job.bounds, job.instances, job.elastic) == (Bounds(1, 4), 1, True)
    assert job.cwd == "/workspace/elastic_train"
    assert job.env["PADDLE_INIT_NUM_PASSES"] == "2"
    assert job.pod == Pod(image="edl-examples:cpu", resources={"cpu": "250m", "memory": "2Gi"})


def test_a_relative_workspace_is_below_the_dags_folder(tmp_path: Path, context: Any) -> None:
    """As any trainer's folder is, wherever the manifest lies."""
    (tmp_path / "job.yaml").write_text(manifest("digits"))
    for given in (tmp_path / "job.yaml", manifest("digits")):
        assert of_manifest(EdlTrainOperator.from_manifest(given, task_id="train"), context).cwd == "/dags/src"


def test_what_is_outdated_stands_in_the_tasks_documentation_and_what_is_given_comes_first() -> None:
    """Where the DAG's reader sees it; a DAG that is parsed every minute would only fill a log."""
    operator = EdlTrainOperator.from_manifest(manifest("digits"), task_id="train", checkpoint="c", trainers="1:2")
    assert (operator.checkpoint, operator.trainers) == ("c", "1:2")
    assert operator.doc_md
    assert operator.doc_md.startswith("From the TrainingJob `digits`.\n\n- ")
    assert "- spec.pserver is ignored: every trainer holds" in operator.doc_md
    assert EdlTrainOperator.from_manifest(manifest("digits"), task_id="train", doc_md="Ours.").doc_md == "Ours."


def test_one_of_several_is_named() -> None:
    """Without a name, or with another, the error says which there are."""
    both = manifest("digits") + "---" + manifest("letters")
    operator = EdlTrainOperator.from_manifest(both, task_id="train", name="letters")
    assert operator.trainer.env["PADDLE_JOB_NAME"] == "letters"
    for name in ("", "expected"):
        with pytest.raises(SpecError, match=rf"name: got '{name}', allowed is one of .* 'digits', 'letters'"):
            EdlTrainOperator.from_manifest(both, task_id="train", name=name)
