"""The task of elastic training: what it is given, what it makes of that, and how it ends."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from support.airflow.fakes import MadeUpSite, deferred_by, event_of, job_status, landed, rendered, work_of
from support.airflow.templates import SURROUNDINGS

from edl_airflow.decisions import View
from edl_airflow.identity import checkpoint_stream, job_name
from edl_airflow.operators.train import EdlTrainOperator
from edl_airflow.work import LandedCheckpoint, Outcome, Training, Work
from edl_runtime.errors import JobFailedError
from edl_runtime.pods import Pod, Volume
from edl_runtime.progress import Progress
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, Checkpoint, TrainerSpec

SCRIPT = TrainerSpec(command=("python", "train.py", "{{ run_id }}"), env={"LOW": "{{ params.low }}"})
EVENING = datetime(2026, 1, 31, 22, 0, tzinfo=UTC)
ALONE = work_of(pool="", pool_job=None, stream="nightly/train", ends_at=1000.0, stop_grace_s=60.0)
RUNNING = View(trainer=job_status("student"), started=True)


def _train(**changes: Any) -> EdlTrainOperator:
    given: dict[str, Any] = {"task_id": "train", "trainer": SCRIPT, "trainers": "1:3", "deferrable": True}
    return EdlTrainOperator(**{**given, **changes})


def _plan(context: Any, **changes: Any) -> Work:
    return rendered(_train(**changes), context).plan(context, SURROUNDINGS)


def test_the_job_is_agents_that_run_the_script(context: Any) -> None:
    """Each knows the bounds, the gear, where checkpoints are and where it is told that one has landed."""
    keeps = Checkpoint(url="s3://runs/{{ params.high }}", every_steps=100)
    work = _plan(context, trainers="{{ params.low }}:{{ params.high }}", gear="warm", checkpoint=keeps)
    job = work.trainer_job
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
    assert (work.stream, work.pool, work.ends_at, work.name) == ("nightly/distill", "", None, job.name)


@pytest.mark.parametrize(("trainers", "bounds"), [(2, Bounds(2, 2)), ("2", Bounds(2, 2)), (Bounds(1, 4), Bounds(1, 4))])
def test_how_many_trainers(trainers: Any, bounds: Bounds, context: Any) -> None:
    """A number, its text or bounds."""
    job = _plan(context, trainers=trainers).trainer_job
    assert job
    assert job.bounds == bounds


def test_a_job_has_the_priority_and_weight_of_its_task(context: Any) -> None:
    """Nothing special unless that is said."""
    job, plain = _plan(context, priority=-2, weight=3).trainer_job, _plan(context).trainer_job
    assert job
    assert plain
    assert (job.priority, job.weight, plain.priority, plain.weight) == (-2, 3.0, 0, 1.0)


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


def test_a_stream_is_of_a_dag_and_task_and_outlives_the_run() -> None:
    """Each mapped task has one of its own."""
    assert checkpoint_stream("nightly", "train", -1) == "nightly/train"
    assert checkpoint_stream("nightly", "train", 0) == "nightly/train/0"


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
    site: MadeUpSite,
) -> None:
    """Its seven o'clock is that of the night that it was for; who starts one by hand means the next one."""
    morning = EVENING + timedelta(hours=9, seconds=5)
    context["dag_run"] = SimpleNamespace(start_date=morning, run_after=EVENING, run_type=run_type)
    work = _plan(context, ends_by="07:00")
    assert work.ends_at == (EVENING + timedelta(hours=9 if late else 33)).timestamp()
    if late:
        with pytest.raises(AirflowSkipException, match="the time to train was over before the run began"):
            rendered(_train(ends_by="07:00"), context).execute(context)
        assert site.backend.deeds == []


@pytest.mark.parametrize("mistake", [{"trainers": "{{ run_id }}"}, {"ends_by": "{{ run_id }}"}, {"job": "{{ 'A b' }}"}])
def test_what_a_template_makes_is_checked_before_anything_starts(
    mistake: dict[str, Any], context: Any, site: MadeUpSite
) -> None:
    """The task fails at once, and there is nothing to clean up."""
    with pytest.raises(AirflowFailException):
        rendered(_train(**mistake), context).execute(context)
    assert site.backend.deeds == []


def test_the_first_half_starts_the_training_and_defers(context: Any, site: MadeUpSite) -> None:
    """It needs no pool; the link to the log is there."""
    deferred_by(rendered(_train(job="digits"), context), context)
    assert site.backend.deeds == [("submit", "digits")]
    assert context["ti"].xcoms == {
        "_link_TrainersLink": "/edl/jobs/edl_default/digits",
        "_link_TrainerLogLink": "/edl/jobs/edl_default/digits/log",
    }


def test_what_it_returns(context: Any, site: MadeUpSite) -> None:
    """The newest checkpoint, what the script said of it, and how the training has ended."""
    deferred = deferred_by(rendered(_train(job="digits"), context), context)
    ended = Outcome(
        ended="succeeded",
        name="digits",
        result={"checkpoint": "/c/42", "metrics": {"score": 2}},
        progress=Progress(step=43, epoch=4, updated_at=1.0),
        training=Training(members=(0, 2), ended="stopped", reason="its time to train is over"),
        generations=3,
        landed=landed(42, job="digits", metrics={"accuracy": 0.9}),
    )
    assert _train(job="digits").execute_complete(context, event_of(deferred, ended)) == {
        "job": "digits",
        "checkpoint": "/c/42",
        "step": 42,
        "epoch": 1,
        "metrics": {"accuracy": 0.9, "score": 2},
        "stopped": True,
        "reason": "its time to train is over",
        "instances": 2,
        "generations": 3,
    }
    assert site.backend.jobs == {}


@pytest.mark.parametrize("before", [None, landed(40, job="digits", metrics={"accuracy": 0.9})])
def test_what_it_returns_of_a_script_that_leaves_a_model_of_its_own(
    context: Any, site: MadeUpSite, before: LandedCheckpoint | None
) -> None:
    """Its step is how far the script came, and not that of the last checkpoint before, if there is one."""
    deferred = deferred_by(rendered(_train(job="digits"), context), context)
    left = {"checkpoint": "/own/model", "metrics": {}}
    progress = Progress(step=43, epoch=4, updated_at=1.0)
    ended = Outcome(ended="succeeded", name="digits", result=left, progress=progress, landed=before)
    result = _train(job="digits").execute_complete(context, event_of(deferred, ended))
    assert (result["checkpoint"], result["step"], result["epoch"], result["stopped"]) == ("/own/model", 43, 4, False)
    assert result["metrics"] == (before["metrics"] if before else {})
    assert site.backend.jobs == {}


def test_one_that_does_not_end_is_ended_by_force(context: Any, site: MadeUpSite) -> None:
    """The task goes well if there is a checkpoint of this night, and says so; else it fails and may be tried again."""
    deferred = deferred_by(rendered(_train(job="digits"), context), context)
    stopped = Outcome(ended="stopped", name="digits", reason="it did not end", landed=landed(7, job="digits"))
    result = _train(job="digits").execute_complete(context, event_of(deferred, stopped))
    assert (result["stopped"], result["reason"], result["step"]) == (True, "it did not end", 7)
    assert site.backend.jobs == {}
    with pytest.raises(JobFailedError, match="it has left no checkpoint"):
        _train(job="digits").execute_complete(
            context, event_of(deferred, msgspec.structs.replace(stopped, landed=None))
        )
