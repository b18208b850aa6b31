"""`edl submit`: trainings of TrainingJob manifests, on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.backends.local_processes import wait_until_gone
from support.edl_command import Edl, edl_command
from support.paths import EXAMPLES

from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.local.backend import LocalBackend
from edl_runtime.errors import EX_CONFIG
from edl_runtime.settings import RuntimeSettings

MANIFEST = EXAMPLES / "training_job" / "examplejob.yaml"

TELLS = """
import json, os, sys
told = {name: os.environ.get(name, "") for name in ("EDL_CHECKPOINT", "PADDLE_JOB_NAME", "LR", "SHELL_HAS")}
print(json.dumps({**told, "cwd": os.getcwd(), "argv": sys.argv[1:]}))
"""

WAITS = """
import os, time
while not os.path.exists("go"):
    time.sleep(0.02)
"""


def manifest(*names: str, entrypoint: str = "python script.py $LR", workspace: str = "src") -> str:
    """Return TrainingJobs of these names that run a script in the folder "src" beside the manifest."""
    return "---\n".join(
        f"""
apiVersion: paddlepaddle.org/v1
kind: TrainingJob
metadata: {{name: {name}}}
spec:
  fault_tolerant: true
  trainer:
    entrypoint: {entrypoint}
    workspace: {workspace}
    envs: {{LR: "0.1"}}
    min-instance: 1
    max-instance: 2
  pserver: {{min-instance: 1, max-instance: 1}}
"""
        for name in names
    )


class Submitting:
    """`edl submit` in a folder with a manifest and a script."""

    def __init__(self, folder: Path, work_dir: Path, edl: Edl) -> None:
        self.folder = folder
        self.backend = LocalBackend(work_dir)
        self._edl = edl
        (folder / "src").mkdir(parents=True)

    def write(self, script: str, text: str) -> None:
        """Have a manifest, and the script that it runs."""
        (self.folder / "src" / "script.py").write_text(script)
        (self.folder / "job.yaml").write_text(text)

    def __call__(self, *words: str, file: Path | str = "job.yaml") -> tuple[int, str, str]:
        """Return the exit status, what was printed and what was complained of."""
        return self._edl("submit", "-f", file, *words)

    def ended(self, *names: str, within_s: float = 100) -> dict[str, str]:
        """Return how these jobs have ended."""
        deadline = time.monotonic() + within_s
        while True:
            statuses = [self._get(name) for name in names]
            if all(status.has_ended for status in statuses):
                return {status.name: status.phase for status in statuses}
            assert time.monotonic() < deadline, [self.lines(name) for name in names]
            time.sleep(0.1)

    def lines(self, name: str) -> list[str]:
        """Return what the job's instances have written."""

        async def read() -> list[str]:
            return [line.text async for line in self.backend.logs(name)]

        return asyncio.run(read())

    def told(self, name: str) -> dict[str, Any]:
        """Return what a job's script saw of itself."""
        assert self.ended(name) == {name: "succeeded"}
        (line,) = (line for line in self.lines(name) if line.startswith("{"))
        told: dict[str, Any] = json.loads(line)
        return told

    def _get(self, name: str) -> JobStatus:
        return asyncio.run(self.backend.get(name))


@pytest.fixture
def submit(
    tmp_path: Path,
    work_dir: Path,
    settings: RuntimeSettings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Submitting]:
    """`edl submit` as a person runs it; nothing is left behind."""
    for name in [name for name in os.environ if name.startswith("EDL_")]:
        monkeypatch.delenv(name)
    with edl_command(monkeypatch, capsys) as edl:
        own = {"EDL_NAMESPACE": settings.namespace, "EDL_REDIS_URL": settings.redis_url, "EDL_WORK_DIR": str(work_dir)}
        for name, value in {**own, "OMP_NUM_THREADS": "1", "SHELL_HAS": "it"}.items():
            monkeypatch.setenv(name, value)
        submitting = Submitting(tmp_path / "mine", work_dir, edl)
        monkeypatch.chdir(submitting.folder)
        yield submitting
    for status in asyncio.run(submitting.backend.list()):
        asyncio.run(submitting.backend.delete(status.name))
    wait_until_gone(work_dir)


def test_a_manifest_runs_as_it_is_written(submit: Submitting) -> None:
    """Its folder, environment and arguments are the script's; the shell's are not; and what is outdated is said."""
    submit.write(TELLS, manifest("digits"))
    status, printed, complaint = submit("--checkpoint", "kept", "--json")
    assert status == 0, complaint
    assert json.loads(printed)["name"] == "digits"
    assert "edl: spec.pserver is ignored: every trainer holds the whole model" in complaint
    assert submit.told("digits") == {
        "EDL_CHECKPOINT": str(submit.folder / "kept" / "digits"),
        "PADDLE_JOB_NAME": "digits",
        "LR": "0.1",
        "SHELL_HAS": "",
        "cwd": str(submit.folder / "src"),
        "argv": ["0.1"],
    }


def test_each_document_is_a_job_and_begins_with_as_many_as_are_wanted(submit: Submitting) -> None:
    """Each can be resized within its bounds."""
    submit.write(WAITS, manifest("one", "two"))
    status, printed, complaint = submit("--start", "2", "--priority", "-2", "--weight", "0.5")
    assert status == 0, complaint
    assert "one is started; `edl logs -f one` follows its output\ntwo is started" in printed
    for name in ("one", "two"):
        job = asyncio.run(submit.backend.get(name))
        assert (job.wanted, job.elastic, job.kind) == (2, True, "trainer")
        assert job.scaling
        assert (job.scaling.priority, job.scaling.weight) == (-2, 0.5)
    assert asyncio.run(submit.backend.resize("one", 1)).wanted == 1
    (submit.folder / "src" / "go").touch()
    assert submit.ended("one", "two") == {"one": "succeeded", "two": "succeeded"}


def test_a_copy_runs_beside_the_first_under_another_name(submit: Submitting) -> None:
    """A second one of the same name is refused while the first runs, and none of the others starts either."""
    submit.write(WAITS, manifest("digits"))
    assert submit()[0] == 0
    status, _, complaint = submit()
    assert (status, "a job 'digits' runs" in complaint) == (1, True)
    assert submit("--name", "digits-2")[0] == 0
    (submit.folder / "job.yaml").write_text(manifest("first", "digits"))
    assert "a job 'digits' runs" in submit()[2]
    (submit.folder / "src" / "go").touch()
    assert submit.ended("digits", "digits-2") == {"digits": "succeeded", "digits-2": "succeeded"}
    assert {job.name for job in asyncio.run(submit.backend.list())} == {"digits", "digits-2"}
    submit.write(TELLS, manifest("digits"))
    assert submit("--workspace", "src")[0] == 0  # an ended one makes way
    assert submit.told("digits")["cwd"] == str(submit.folder / "src")


def test_an_absolute_entrypoint_is_found_in_the_folder_that_replaces_the_image_s(submit: Submitting) -> None:
    """As in EDL's own manifests, whose scripts are in the image's /workspace."""
    submit.write(TELLS, manifest("digits", entrypoint="python /workspace/script.py $LR", workspace="/workspace"))
    assert submit("--workspace", "src")[0] == 0
    assert submit.told("digits")["cwd"] == str(submit.folder / "src")


AWAY = "redis://:sesame@127.0.0.1:1/0"


@pytest.mark.parametrize(
    ("text", "words", "redis_url", "refused"),
    [
        (manifest("digits"), [], "", (EX_CONFIG, "EDL_REDIS_URL: got '', allowed is the Redis")),
        (manifest("digits"), [], AWAY, (1, "Redis at 127.0.0.1:1")),
        (manifest("digits"), ["--start", "3"], AWAY, (EX_CONFIG, "instances: got 3, allowed is 1 to 2")),
        (
            manifest("one", "two"),
            ["--name", "x"],
            AWAY,
            (EX_CONFIG, "name: got 'x', allowed is no name for 2 TrainingJobs"),
        ),
        (manifest("digits", entrypoint="a && b"), [], AWAY, (EX_CONFIG, "spec.trainer.entrypoint: got '&&'")),
        ("", ["-f", "none.yaml"], AWAY, (EX_CONFIG, "manifest: got 'none.yaml', allowed is a file that can be read")),
    ],
)
def test_what_can_not_work_is_an_error_before_anything_runs(
    submit: Submitting, text: str, words: list[str], redis_url: str, refused: tuple[int, str]
) -> None:
    """With the exit status that says whether a restart could help, and without the password."""
    os.environ["EDL_REDIS_URL"] = redis_url  # until the fixture's end
    submit.write(TELLS, text)
    status, _, complaint = submit(*words)
    assert status == refused[0]
    assert refused[1] in complaint
    assert "sesame" not in complaint
    assert asyncio.run(submit.backend.list()) == []


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_the_example_trains_in_several_copies(submit: Submitting) -> None:
    """As the tutorial does: one file, submitted again under other names, each a training of its own."""
    pytest.importorskip("paddle")
    for folder in ("elastic_train", "mnist_distill"):
        shutil.copytree(EXAMPLES / folder, submit.folder / folder, ignore=shutil.ignore_patterns("data", "__pycache__"))
    words = ["--workspace", "elastic_train", "--checkpoint", "kept"]
    for copy in ([], ["--name", "example-2", "--start", "2"], ["--name", "example-3"]):
        status, _, complaint = submit(*words, *copy, file=MANIFEST)
        assert status == 0, complaint
    names = ["example", "example-2", "example-3"]
    assert asyncio.run(submit.backend.get("example-2")).wanted == 2
    assert submit.ended(*names, within_s=300) == dict.fromkeys(names, "succeeded")
    for name in names:
        assert any(line.startswith("step 100: loss") for line in submit.lines(name)), submit.lines(name)
        assert list((submit.folder / "kept" / name).iterdir())
