"""Specs become jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edl_airflow.jobs import pool_job, trainer_job
from edl_runtime.errors import SpecError
from edl_runtime.pods import Pod
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, Checkpoint, JobSpec, TeacherSpec, TrainerSpec

FOLDER = Path("/dags")


def _pool(**given: Any) -> JobSpec:
    return pool_job("digits", TeacherSpec(**given), Bounds(1, 3), namespace="team", folder=FOLDER)


def _student(*, pool_digest: str = "", **given: Any) -> JobSpec:
    spec = TrainerSpec(**given)
    settings = RuntimeSettings(job="job", pool="digits", namespace="team", teacher_wait_s=30)
    return trainer_job(spec, None, settings=settings, folder=FOLDER, pool_digest=pool_digest)


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("/models/m", "/models/m"),
        ("m.onnx", "/dags/m.onnx"),
        ("../m", "/dags/../m"),
        ("~/m", "/home/ada/m"),
        ("pkg.mod:answer", "pkg.mod:answer"),
        ("s3://b/m", "s3://b/m"),
    ],
)
def test_relative_models_start_from_the_folder_of_the_dag(
    model: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Absolute paths, functions and URLs stay as they are; "~" is the home folder."""
    monkeypatch.setenv("HOME", "/home/ada")
    command = _pool(model=model).command
    assert command[command.index("--model") + 1] == given


def test_the_pools_command_says_what_the_spec_says() -> None:
    """Each field of the spec reaches the teacher's command line."""
    job = _pool(model="/m", outputs=("a", "b=c"), gpu_ids=(0, 1), mem_optim=True, max_batch=8, hung_after_s=60)
    assert job.command[:5] == ("python", "-P", "-m", "edl_runtime.cli", "teacher")
    assert job.command[5:] == (
        *("--model", "/m", "--pool", "digits", "--outputs", "a,b=c", "--gpu_ids", "0,1", "--mem_optim"),
        *("--max_batch", "8", "--hung_after", "60"),
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


def test_a_script_without_agents_is_not_elastic() -> None:
    """One that a signal ends has failed, and nobody counts its instances."""
    assert not _student(command=["a"]).elastic


def test_the_same_spec_makes_the_same_job() -> None:
    """Whether a retry may adopt a running job is told by the digest."""
    assert _student(command=["a"]).digest == _student(command=("a",)).digest
    assert _student(command=["a"]).digest != _student(command=["b"]).digest


def test_other_teachers_make_another_job() -> None:
    """So that a retry with another teacher does not go on with what the old one has taught."""
    assert _student(command=["a"], pool_digest="1").digest != _student(command=["a"], pool_digest="2").digest


@pytest.mark.parametrize(
    ("url", "given"), [("ck", "/dags/ck"), ("/ck", "/ck"), ("~/ck", "/home/ada/ck"), ("s3://b/~/ck", "s3://b/~/ck")]
)
def test_checkpoints_start_from_the_folder_of_the_dag(url: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute paths and URLs stay as they are; "~" is the home folder."""
    monkeypatch.setenv("HOME", "/home/ada")
    spec = TrainerSpec(command=["a"])
    job = trainer_job(
        spec, Bounds(1, 2), settings=RuntimeSettings(job="job"), folder=FOLDER, checkpoint=Checkpoint(url=url)
    )
    assert job.env["EDL_CHECKPOINT"] == given


@pytest.mark.parametrize(
    ("cwd", "given"), [("", ""), ("src", "/dags/src"), ("/src", "/src"), ("~/src", "/home/ada/src")]
)
def test_a_students_folder_starts_from_the_dags(cwd: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one is the job's own work folder."""
    monkeypatch.setenv("HOME", "/home/ada")
    assert _student(command=["a"], cwd=cwd).cwd == given


def test_in_pods_paths_are_those_of_the_pods() -> None:
    """The DAG's folder is not there: relative paths start where the image says, and checkpoints need a volume."""
    pod = Pod(image="edl:1")
    pool = pool_job("p", TeacherSpec(model="models/m", pod=pod), Bounds(1, 3), namespace="team", folder=None)
    assert (pool.command[pool.command.index("--model") + 1], pool.cwd, pool.pod) == ("models/m", "", pod)
    settings = RuntimeSettings(job="job")
    trainer = TrainerSpec(command=["python", "train.py"], cwd="work", pod=pod)
    for url in ("/checkpoints/job", "s3://bucket/job"):
        job = trainer_job(trainer, Bounds(1, 2), settings=settings, folder=None, checkpoint=Checkpoint(url=url))
        assert (job.cwd, job.pod, job.env["EDL_CHECKPOINT"]) == ("work", pod, url)
    with pytest.raises(SpecError, match=r"checkpoint.url.*'runs/job'.*a volume"):
        trainer_job(trainer, Bounds(1, 2), settings=settings, folder=None, checkpoint=Checkpoint(url="runs/job"))


def test_teachers_answer_whether_they_are_well() -> None:
    """A backend may ask each at its port."""
    assert _pool(model="m").serves_http
    assert not _student(command=["python", "s.py"]).serves_http
