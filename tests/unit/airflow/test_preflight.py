"""What is wrong with a script or model is seen before anything is started for it."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.airflow.fakes import STUDENT, FakeClient, job_status, rendered, spec_of
from support.airflow.templates import distill

from edl_airflow.operators.preflight import check_checkpoint_folder, check_model, check_script
from edl_airflow.runtime import runner
from edl_airflow.runtime.spec import TaskSpec
from edl_runtime.errors import SpecError
from edl_runtime.specs import Checkpoint, TeacherSpec, TrainerSpec
from edl_runtime.teacher.errors import ModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A DAG's folder with a script in `jobs`, which is a program as well."""
    (tmp_path / "jobs").mkdir()
    script = tmp_path / "jobs" / "train.py"
    script.touch()
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "jobs" / "package").mkdir()
    (tmp_path / "jobs" / "package" / "__main__.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    "given",
    [
        {"command": ["python", "train.py", "--epochs", "3"], "cwd": "jobs"},
        {"command": ["python3", "-u", "-W", "ignore", "train.py"], "cwd": "jobs"},
        {"command": ["./train.py"], "cwd": "jobs"},
        {"command": ["python", "package"], "cwd": "jobs"},
        {"command": ["python", "-c", "pass"]},
        {"command": ["python", "-um", "my.training", "nothing.py"]},
        {"command": ["bash", "-c", "python nothing.py"]},
    ],
)
def test_what_is_there_passes(given: dict[str, Any], folder: Path) -> None:
    """And what only the program itself knows how to find."""
    check_script("trainer", TrainerSpec(**given), folder)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"command": ["python", "tran.py"], "cwd": "jobs"}, "jobs/tran.py', allowed is an existing file"),
        ({"command": ["python", "-X", "dev", "/no/train.py"]}, "trainer.command: got '/no/train.py'"),
        ({"command": ["python", "train.py"]}, "an absolute path, or one below the folder that trainer.cwd names"),
        ({"command": ["pyton", "train.py"], "cwd": "jobs"}, "trainer.command: got 'pyton', allowed is a program on"),
        ({"command": ["/no/python", "train.py"], "cwd": "jobs"}, "trainer.command: got '/no/python'"),
        ({"command": ["python", ".."], "cwd": "jobs"}, "jobs/..', allowed is a file; this is a folder"),
        ({"command": ["./package"], "cwd": "jobs"}, "jobs/package', allowed is a file; this is a folder"),
        ({"command": ["package/__main__.py"], "cwd": "jobs"}, "__main__.py', allowed is a program that may be run"),
        ({"command": ["python", "train.py"], "cwd": "job"}, "/job', allowed is an existing folder"),
    ],
)
def test_what_is_not_there_is_named(given: dict[str, Any], expected: str, folder: Path) -> None:
    """With the path that was looked for."""
    with pytest.raises(SpecError, match=re.escape(expected)):
        check_script("trainer", TrainerSpec(**given), folder)


@pytest.mark.parametrize("url", ["ck", "ck/new/er", "jobs", "s3://runs/a", "file:///proc/nope", "{folder}/ck"])
def test_a_place_for_checkpoints_passes(url: str, folder: Path) -> None:
    """One that is there or can be made, and URLs, which nobody asks; nothing is left there."""
    before = sorted(folder.rglob("*"))
    check_checkpoint_folder(Checkpoint(url=url.format(folder=folder)), folder)
    check_checkpoint_folder(None, folder)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("/proc/nope/ck", "/proc: No such file or directory"),
        ("jobs/train.py", "train.py: Not a directory"),
        ("jobs/train.py/ck", "train.py: Not a directory"),
        ("dangling", "dangling: No such file or directory"),
    ],
)
def test_a_place_that_can_not_keep_checkpoints_is_named(url: str, why: str, folder: Path) -> None:
    """With the part of the path that is in the way, and what the system says of it."""
    (folder / "dangling").symlink_to("nowhere")
    with pytest.raises(SpecError, match=re.escape(why)) as caught:
        check_checkpoint_folder(Checkpoint(url=url), folder)
    assert (caught.value.field, caught.value.given) == ("checkpoint.url", str(folder / url))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("url", ["jobs", "jobs/ck"])
def test_a_folder_that_can_not_be_written_in_is_named(url: str, folder: Path) -> None:
    """Be it the one for checkpoints, or the one that this is to be made in."""
    (folder / "jobs").chmod(0o500)
    with pytest.raises(SpecError, match="jobs: Permission denied"):
        check_checkpoint_folder(Checkpoint(url=url), folder)


def _saved(folder: Path, *outputs: str) -> None:
    """Write what Paddle 3 writes of a model, as much of it as names its outputs."""
    fetches = [{"#": "1.fetch", "A": [{"AT": {"#": "0.a_str", "D": name}, "N": "name"}]} for name in outputs]
    program = {"program": {"regions": [{"blocks": [{"ops": [{"#": "p", "A": [0, 1]}, *fetches]}]}]}}
    (folder / "net.json").write_bytes(msgspec.json.encode(program))
    (folder / "net.pdiparams").touch()


@pytest.mark.parametrize(
    ("model", "outputs", "expected"),
    [
        ("jobs", ["logits=fetch_name_1"], "no output 'fetch_name_1'; it has fetch_name_0"),
        ("models", [], "models': there is no such folder"),
        ("net.onnx", [], "net.onnx': there is no such file"),
    ],
)
def test_a_model_is_looked_at_without_loading_it(model: str, outputs: list[str], expected: str, folder: Path) -> None:
    """A program of Paddle 3 names its outputs."""
    _saved(folder / "jobs", "fetch_name_0")
    with pytest.raises(ModelError, match=re.escape(expected)):
        check_model(TeacherSpec(model=model, outputs=outputs), folder)


def test_what_tells_nothing_before_it_is_loaded_passes(folder: Path) -> None:
    """A function, and a program of another format."""
    check_model(TeacherSpec(model="answers:double", outputs=["y"]), folder)
    for content in (b"[]", b"{}"):
        _saved(folder / "jobs")
        (folder / "jobs" / "net.json").write_bytes(content)
        check_model(TeacherSpec(model="jobs", outputs=["y"]), folder)


def test_a_damaged_model_is_refused_before_it_is_loaded(folder: Path) -> None:
    """So that no teacher of it is started and waited for."""
    _saved(folder / "jobs")
    (folder / "jobs" / "net.json").write_bytes(b"garbage")
    (folder / "net.onnx").write_bytes(b"garbage")
    for model, file in (("jobs", "net.json"), ("net.onnx", "net.onnx")):
        with pytest.raises(ModelError, match=f"{file} is damaged"):
            check_model(TeacherSpec(model=model), folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"student": TrainerSpec(command=["python", "/no/student.py"])}, "student.command: got '/no/student.py'"),
        (
            {"students": 1, "checkpoint": "/proc/nope/ck"},
            "checkpoint.url: got '/proc/nope/ck', allowed is a writable folder",
        ),
        ({"teacher": TeacherSpec(model="/no/model")}, "model '/no/model': there is no such folder"),
    ],
)
def test_nothing_is_started_for_what_is_not_there(
    changes: dict[str, Any], expected: str, context: Any, site: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is there a wait for teachers."""
    monkeypatch.setattr("edl_airflow.operators.distill.check_script", check_script)
    monkeypatch.setattr("edl_airflow.operators.distill.check_model", check_model)
    monkeypatch.setattr("edl_airflow.operators.distill.check_checkpoint_folder", check_checkpoint_folder)
    given = {"teacher": TeacherSpec(model="answers:double"), "student": TrainerSpec(command=["python", "-c", "pass"])}
    with pytest.raises(AirflowFailException, match=re.escape(expected)) as caught:
        rendered(distill(**{**given, **changes}), context).execute(context)
    assert site.backend.calls == []
    assert caught.value.__cause__ is None


async def test_what_runs_already_is_not_looked_at(site: FakeClient) -> None:
    """A training goes on though its script has been moved meanwhile."""
    digest = STUDENT.digest
    site.backend.jobs["student"] = job_status("student", "try-0", digest=digest)

    def fails() -> None:
        raise SpecError("trainer.command", "a", "an existing file")

    spec = spec_of(pool="", pool_job=None)
    assert isinstance(await runner.start(spec, site, fails), TaskSpec)
    site.backend.jobs.clear()
    with pytest.raises(SpecError):
        await runner.start(spec, site, fails)
    assert site.backend.jobs == {}
