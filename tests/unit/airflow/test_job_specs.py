"""Specs become jobs, with names and tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edl_airflow.identity import checkpoint_stream, is_retry, job_name, owner, pool_name, try_id, try_token
from edl_airflow.operators.job_specs import pool_job_spec, trainer_job_spec
from edl_runtime.backends.interface import token_owner
from edl_runtime.errors import SpecError
from edl_runtime.pods import Pod
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, Checkpoint, JobSpec, TeacherSpec, TrainerSpec, check_name

FOLDER = Path("/dags")


def _pool(**given: Any) -> JobSpec:
    return pool_job_spec("digits", TeacherSpec(**given), Bounds(1, 3), namespace="team", folder=FOLDER)


def _student(**given: Any) -> JobSpec:
    spec = TrainerSpec(**given)
    settings = RuntimeSettings(job="job", pool="digits", namespace="team", teacher_wait_s=30)
    return trainer_job_spec(spec, None, settings=settings, folder=FOLDER)


def _kept_at(url: str) -> str:
    settings = RuntimeSettings(job="job")
    trainer, keeps = TrainerSpec(command=["a"]), Checkpoint(url=url)
    return trainer_job_spec(trainer, Bounds(1, 2), settings=settings, folder=FOLDER, checkpoint=keeps).env[
        "EDL_CHECKPOINT"
    ]


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("/models/m", "/models/m"),
        ("m.onnx", "/dags/m.onnx"),
        ("../m", "/dags/../m"),
        ("~/m", "/home/ada/m"),
        ("pkg.mod:answer", "pkg.mod:answer"),
        ("s3://b/~/m", "s3://b/~/m"),
    ],
)
def test_relative_paths_start_from_the_folder_of_the_dag(
    model: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of models, checkpoints and students' folders; functions and URLs stay as they are, "~" is the home folder."""
    monkeypatch.setenv("HOME", "/home/ada")
    command = _pool(model=model).command
    assert command[command.index("--model") + 1] == given
    if ":" not in model:
        assert _student(command=["a"], cwd=model).cwd == given
    if "pkg" not in model:
        assert _kept_at(model) == given


def test_the_pools_command_says_what_the_spec_says() -> None:
    """Each field of the spec reaches the teacher's command line."""
    job = _pool(model="/m", outputs=("a", "b=c"), gpu_ids=(0, 1), mem_optim=True, max_batch=8, hung_after_s=60)
    assert job.command[:5] == ("python", "-P", "-m", "edl_runtime.cli", "teacher")
    assert job.command[5:] == (
        *("--model", "/m", "--pool", "digits", "--outputs", "a,b=c", "--gpu-ids", "0,1", "--mem-optim"),
        *("--max-batch", "8", "--hung-after", "60"),
    )
    assert (job.kind, job.instances, job.bounds) == ("pool", 1, Bounds(1, 3))


def test_instances_know_their_surroundings_and_no_secret() -> None:
    """Pool, job and namespace stand in the spec; the address of Redis, which has a password, does not."""
    job = _student(command=["python", "s.py"], env={"LR": "0.1"})
    assert RuntimeSettings.from_env(job.env) == RuntimeSettings(
        job="job", pool="digits", namespace="team", teacher_wait_s=30
    )
    assert job.env["LR"] == "0.1"
    assert "EDL_REDIS_URL" not in job.env


def test_in_pods_paths_are_those_of_the_pods() -> None:
    """The DAG's folder is not there: relative paths start where the image says, and checkpoints need a volume."""
    pod = Pod(image="edl:1")
    pool = pool_job_spec("p", TeacherSpec(model="models/m", pod=pod), Bounds(1, 3), namespace="team", folder=None)
    assert (pool.command[pool.command.index("--model") + 1], pool.cwd, pool.pod) == ("models/m", "", pod)
    settings = RuntimeSettings(job="job")
    trainer = TrainerSpec(command=["python", "train.py"], cwd="spec", pod=pod)
    for url in ("/checkpoints/job", "s3://bucket/job"):
        job = trainer_job_spec(trainer, Bounds(1, 2), settings=settings, folder=None, checkpoint=Checkpoint(url=url))
        assert (job.cwd, job.pod, job.env["EDL_CHECKPOINT"]) == ("spec", pod, url)
    with pytest.raises(SpecError, match=r"checkpoint.url.*'runs/job'.*a volume"):
        trainer_job_spec(trainer, Bounds(1, 2), settings=settings, folder=None, checkpoint=Checkpoint(url="runs/job"))


def test_a_script_without_agents_is_not_elastic_and_no_server() -> None:
    """One that a signal ends has failed, and nobody counts its instances; teachers answer whether they are well."""
    script = _student(command=["python", "s.py"])
    assert (script.elastic, script.serves_http, script.cwd) == (False, False, "")
    assert _pool(model="m").serves_http


def _ti(**changes: Any) -> Any:
    given = {"id": "0190-a", "dag_id": "nightly", "task_id": "distill", "run_id": "manual__1", "map_index": -1}
    given |= {"max_tries": 2}
    return SimpleNamespace(**{**given, **changes})


def test_names_and_owners_are_the_same_for_every_try_and_tokens_are_not() -> None:
    """A retry finds the job of the try before, and a kill of that one does not hit it. People can read the name."""
    first, second = _ti(id="0190-a"), _ti(id="0190-b")
    assert job_name(first) == job_name(second) != pool_name(first)
    assert job_name(first).startswith("nightly-distill-")
    assert try_token(first) != try_token(second)
    assert token_owner(try_token(first)) == token_owner(try_token(second)) == owner(first)


def test_a_retry_is_told_from_a_clear() -> None:
    """After a clear Airflow allows more tries; another run's is neither, nor is one of an earlier version."""
    first = try_token(_ti(id="0190-a"))
    assert is_retry(try_token(_ti(id="0190-b")), first)
    for other in (_ti(id="0190-b", max_tries=3), _ti(id="0190-b", run_id="manual__2")):
        assert not is_retry(try_token(other), first)
    earlier = f"{owner(_ti())}/0190-a"
    assert not is_retry(first, earlier)
    assert try_id(first) == try_id(earlier) == "0190-a"


@pytest.mark.parametrize(
    "change", [{"dag_id": "weekly"}, {"task_id": "train"}, {"run_id": "manual__2"}, {"map_index": 0}, {"map_index": 1}]
)
def test_another_task_instance_has_other_names(change: dict[str, Any]) -> None:
    """Each part of the identity counts."""
    assert job_name(_ti(**change)) != job_name(_ti())
    assert owner(_ti(**change)) != owner(_ti())


@pytest.mark.parametrize(
    ("dag_id", "task_id"), [("a.b", "c_d"), ("D" * 200, "t" * 200), ("ünï", "蒸馏"), ("__", "--"), ("a-", "-b")]
)
def test_any_airflow_name_makes_a_valid_one(dag_id: str, task_id: str) -> None:
    """Names that Airflow allows and DNS does not become labels of at most 52 letters."""
    ti = _ti(dag_id=dag_id, task_id=task_id)
    check_name("job", job_name(ti))
    check_name("pool", pool_name(ti))


def test_a_stream_is_of_a_dag_and_task_and_outlives_the_run() -> None:
    """Each mapped task has one of its own."""
    assert checkpoint_stream("nightly", "train", -1) == "nightly/train"
    assert checkpoint_stream("nightly", "train", 0) == "nightly/train/0"
