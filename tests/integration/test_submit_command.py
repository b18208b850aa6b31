"""`edl submit`: trainings of TrainingJob manifests, on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.backends.local_processes import wait_until_gone
from support.paths import EXAMPLES

from edl_runtime.backends.base import JobStatus
from edl_runtime.backends.local import LocalBackend
from edl_runtime.errors import EX_CONFIG
from edl_runtime.settings import RuntimeSettings

MANIFEST = EXAMPLES / "training_job" / "examplejob.yaml"
EDL = [sys.executable, "-P", "-m", "edl_runtime.cli"]

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

    def __init__(self, folder: Path, work_dir: Path, settings: RuntimeSettings) -> None:
        self.folder = folder
        self.work_dir = work_dir
        self.backend = LocalBackend(work_dir)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
        quiet = {"GLOG_minloglevel": "2", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        own = {"EDL_NAMESPACE": settings.namespace, "EDL_REDIS_URL": settings.redis_url, "EDL_WORK_DIR": str(work_dir)}
        self.environ = {**clean, **quiet, **own, "SHELL_HAS": "it"}
        (folder / "src").mkdir(parents=True)

    def write(self, script: str, text: str) -> None:
        """Have a manifest, and the script that it runs."""
        (self.folder / "src" / "script.py").write_text(script)
        (self.folder / "job.yaml").write_text(text)

    def __call__(self, *words: str, file: Path | str = "job.yaml", **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*EDL, "submit", "-f", str(file), *words],
            env={**self.environ, **environ},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def ended(self, *names: str, within_s: float = 60) -> dict[str, str]:
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
def submit(tmp_path: Path, work_dir: Path, settings: RuntimeSettings) -> Iterator[Submitting]:
    """`edl submit` as a person runs it; nothing is left behind."""
    submitting = Submitting(tmp_path / "mine", work_dir, settings)
    yield submitting
    names = [status.name for status in asyncio.run(submitting.backend.list())]
    for name in names:
        asyncio.run(submitting.backend.delete(name))
    wait_until_gone(work_dir)


def test_a_manifest_is_run_as_it_says(submit: Submitting) -> None:
    """Its folder, environment and arguments are the script's; the shell's are not; and what is outdated is said."""
    submit.write(TELLS, manifest("digits"))
    done = submit("--checkpoint", "kept", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "digits"
    assert "edl: spec.pserver means nothing any more: every trainer holds the whole model" in done.stderr
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
    done = submit("--start", "2", "--priority", "-2", "--weight", "0.5")
    assert done.returncode == 0, done.stderr
    assert "one is started; `edl logs -f one` shows what it writes\ntwo is started" in done.stdout
    for name in ("one", "two"):
        status = asyncio.run(submit.backend.get(name))
        assert (status.wanted, status.elastic, status.kind) == (2, True, "trainer")
        assert status.scaling
        assert (status.scaling.priority, status.scaling.weight) == (-2, 0.5)
    assert asyncio.run(submit.backend.resize("one", 1)).wanted == 1
    (submit.folder / "src" / "go").touch()
    assert submit.ended("one", "two") == {"one": "succeeded", "two": "succeeded"}


def test_a_copy_runs_beside_the_first_under_another_name(submit: Submitting) -> None:
    """A second one of the same name is refused while the first runs, and none of the others starts either."""
    submit.write(WAITS, manifest("digits"))
    assert submit().returncode == 0
    refused = submit()
    assert refused.returncode == 1
    assert "a job 'digits' runs" in refused.stderr
    assert submit("--name", "digits-2").returncode == 0
    (submit.folder / "job.yaml").write_text(manifest("first", "digits"))
    assert "a job 'digits' runs" in submit().stderr
    (submit.folder / "src" / "go").touch()
    assert submit.ended("digits", "digits-2") == {"digits": "succeeded", "digits-2": "succeeded"}
    assert {status.name for status in asyncio.run(submit.backend.list())} == {"digits", "digits-2"}
    submit.write(TELLS, manifest("digits"))
    assert submit("--workspace", "src").returncode == 0  # an ended one makes way
    assert submit.told("digits")["cwd"] == str(submit.folder / "src")


@pytest.mark.parametrize(
    ("text", "words", "environ", "said"),
    [
        (manifest("digits"), [], {"EDL_REDIS_URL": ""}, "EDL_REDIS_URL: got '', allowed is the Redis"),
        (manifest("digits"), ["--start", "3"], {}, "instances: got 3, allowed is 1 to 2"),
        (manifest("one", "two"), ["--name", "x"], {}, "name: got 'x', allowed is no name for several TrainingJobs"),
        (manifest("digits", entrypoint="python a && b"), [], {}, "spec.trainer.entrypoint: got '&&'"),
        ("", ["-f", "none.yaml"], {}, "manifest: got 'none.yaml', allowed is a file that can be read (No such file"),
    ],
)
def test_what_can_not_work_is_said_before_anything_runs(
    submit: Submitting, text: str, words: list[str], environ: dict[str, str], said: str
) -> None:
    """With the exit status that says that a restart won't help."""
    submit.write(TELLS, text)
    refused = submit(*words, **environ)
    assert refused.returncode == EX_CONFIG
    assert said in refused.stderr
    assert asyncio.run(submit.backend.list()) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_trains_in_several_copies(submit: Submitting) -> None:
    """As the tutorial does: one file, submitted again under other names, each a training of its own."""
    pytest.importorskip("paddle")
    for folder in ("elastic_train", "mnist_distill"):
        shutil.copytree(EXAMPLES / folder, submit.folder / folder, ignore=shutil.ignore_patterns("data", "__pycache__"))
    words = ["--workspace", "elastic_train", "--checkpoint", "kept"]
    for copy in ([], ["--name", "example-2", "--start", "2"], ["--name", "example-3"]):
        done = submit(*words, *copy, file=MANIFEST)
        assert done.returncode == 0, done.stderr
    names = ["example", "example-2", "example-3"]
    assert asyncio.run(submit.backend.get("example-2")).wanted == 2
    assert submit.ended(*names, within_s=300) == dict.fromkeys(names, "succeeded")
    for name in names:
        assert any(line.startswith("step 100: loss") for line in submit.lines(name)), submit.lines(name)
        assert list((submit.folder / "kept" / name).iterdir())
