"""What is wrong with a script or model is seen before anything is started for it."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.airflow.fakes import STUDENT, MadeUpSite, job_status, rendered, work_of
from support.airflow.templates import distill

from edl_airflow import conductor
from edl_airflow.checks import check_model, check_script
from edl_airflow.work import Work
from edl_runtime.errors import ModelError, SpecError
from edl_runtime.specs import TeacherSpec, TrainerSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A DAG's folder with a script in `jobs`, which is a program as well."""
    (tmp_path / "jobs").mkdir()
    script = tmp_path / "jobs" / "train.py"
    script.touch()
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return tmp_path


@pytest.mark.parametrize(
    "given",
    [
        {"command": ["python", "train.py", "--epochs", "3"], "cwd": "jobs"},
        {"command": ["python3", "-u", "-W", "ignore", "train.py"], "cwd": "jobs"},
        {"command": ["./train.py"], "cwd": "jobs"},
        {"command": ["python", "-c", "pass"]},
        {"command": ["python", "-um", "my.training", "nothing.py"]},
        {"command": ["bash", "-c", "python nothing.py"]},
    ],
)
def test_what_is_there_passes(given: dict[str, Any], folder: Path) -> None:
    """And what only the program itself knows how to find."""
    check_script("trainer", TrainerSpec(**given), folder)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"command": ["python", "tran.py"], "cwd": "jobs"}, "jobs/tran.py', allowed is a file that is there"),
        ({"command": ["python", "-X", "dev", "/no/train.py"]}, "trainer.command: got '/no/train.py'"),
        ({"command": ["python", "train.py"]}, "an absolute path, or one below the folder that trainer.cwd names"),
        ({"command": ["pyton", "train.py"], "cwd": "jobs"}, "trainer.command: got 'pyton', allowed is a program on"),
        ({"command": ["/no/python", "train.py"], "cwd": "jobs"}, "trainer.command: got '/no/python'"),
        ({"command": ["python", "train.py"], "cwd": "job"}, "/job', allowed is a folder that is there"),
    ],
)
def test_what_is_not_there_is_named(given: dict[str, Any], words: str, folder: Path) -> None:
    """With the path that was looked for."""
    with pytest.raises(SpecError, match=re.escape(words)):
        check_script("trainer", TrainerSpec(**given), folder)


def _saved(folder: Path, *outputs: str) -> None:
    """Write what Paddle 3 writes of a model, as much of it as tells its outputs."""
    fetches = [{"#": "1.fetch", "A": [{"AT": {"#": "0.a_str", "D": name}, "N": "name"}]} for name in outputs]
    program = {"program": {"regions": [{"blocks": [{"ops": [{"#": "p", "A": [0, 1]}, *fetches]}]}]}}
    (folder / "net.json").write_bytes(msgspec.json.encode(program))
    (folder / "net.pdiparams").touch()


@pytest.mark.parametrize(
    ("model", "outputs", "words"),
    [
        ("jobs", ["logits=fetch_name_1"], "no output 'fetch_name_1'; it has fetch_name_0"),
        ("models", [], "models': there is no such folder"),
        ("net.onnx", [], "net.onnx': there is no such file"),
    ],
)
def test_a_model_is_looked_at_without_loading_it(model: str, outputs: list[str], words: str, folder: Path) -> None:
    """A program of today's Paddle tells its outputs."""
    _saved(folder / "jobs", "fetch_name_0")
    with pytest.raises(ModelError, match=re.escape(words)):
        check_model(TeacherSpec(model=model, outputs=outputs), folder)


def test_what_tells_nothing_before_it_is_loaded_passes(folder: Path) -> None:
    """A function, and a program of another format."""
    check_model(TeacherSpec(model="answers:double", outputs=["y"]), folder)
    for content in (b"not JSON", b"[]", b"{}"):
        _saved(folder / "jobs")
        (folder / "jobs" / "net.json").write_bytes(content)
        check_model(TeacherSpec(model="jobs", outputs=["y"]), folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"student": TrainerSpec(command=["python", "/no/student.py"])}, "student.command: got '/no/student.py'"),
        ({"teacher": TeacherSpec(model="/no/model")}, "model '/no/model': there is no such folder"),
    ],
)
def test_nothing_is_started_for_what_is_not_there(
    changes: dict[str, Any], words: str, context: Any, site: MadeUpSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is there a wait for teachers."""
    monkeypatch.setattr("edl_airflow.operators.distill.check_script", check_script)
    monkeypatch.setattr("edl_airflow.operators.distill.check_model", check_model)
    given = {"teacher": TeacherSpec(model="answers:double"), "student": TrainerSpec(command=["python", "-c", "pass"])}
    with pytest.raises(AirflowFailException, match=re.escape(words)) as caught:
        rendered(distill(**{**given, **changes}), context).execute(context)
    assert site.backend.deeds == []
    assert caught.value.__cause__ is None


async def test_what_runs_already_is_not_looked_at(site: MadeUpSite) -> None:
    """A training goes on though its script has been moved meanwhile."""
    digest = STUDENT.digest
    site.backend.jobs["student"] = job_status("student", "try-0", digest=digest)

    def fails() -> None:
        raise SpecError("trainer.command", "a", "a file that is there")

    work = work_of(pool="", pool_job=None)
    assert isinstance(await conductor.begin(work, site, fails), Work)
    site.backend.jobs.clear()
    with pytest.raises(SpecError):
        await conductor.begin(work, site, fails)
    assert site.backend.jobs == {}
