"""Jobs of manifests."""

from __future__ import annotations

import pytest

from edl_runtime.compat.job_specs import job_spec
from edl_runtime.compat.training_job import read_training_job
from edl_runtime.settings import RuntimeSettings


@pytest.mark.parametrize(
    ("workspace", "entrypoint", "cwd", "script"),
    [
        ("/workspace", "python /workspace/train.py", "/home/src", "/home/src/train.py"),
        ("/workspace/", "python /workspace/a/train.py", "/home/src/", "/home/src/a/train.py"),
        ("/workspace", "python /workspace/train.py", "/workspace", "/workspace/train.py"),
        ("/workspace", "python /workspaces/train.py", "/home/src", "/workspaces/train.py"),
        ("/workspace", "python train.py", "/home/src", "train.py"),
        ("src", "python src/train.py", "/home/src", "src/train.py"),
        ("/", "python /train.py", "/home/src", "/train.py"),
        ("", "python /train.py", "/home/src", "/train.py"),
    ],
)
def test_the_entrypoint_is_in_the_folder_that_replaces_its_workspace(
    workspace: str, entrypoint: str, cwd: str, script: str
) -> None:
    """Only what is below the manifest's own absolute one moves."""
    (job,) = read_training_job(
        "{apiVersion: paddlepaddle.org/v1, kind: TrainingJob, metadata: {name: digits}, spec: {trainer: "
        f"{{entrypoint: {entrypoint}, workspace: '{workspace}', min-instance: 1}}}}}}"
    )
    spec = job_spec(job, RuntimeSettings(namespace="n", redis_url="redis://h"), cwd=cwd)
    assert spec.command[-1] == script
    assert spec.cwd == cwd
