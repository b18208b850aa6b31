"""Pods of a TrainingJob manifest on a real cluster."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.backends.jobs import ended, eventually
from support.checkpoints.snapshots import steps_of
from support.cluster.cluster import Cluster, RedisService
from support.cluster.trainingjobs import controller, kubectl, trainingjobs_served
from support.paths import EXAMPLES

from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import JobStatus
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.compat.training_job import read_training_job
from edl_runtime.specs import Bounds, Checkpoint, JobSpec

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]


PRINTS_JSON = """
import json, os, pathlib
pathlib.Path("/out/part").mkdir(exist_ok=True)
pathlib.Path("/out/part/text").write_text("through the other mount")
try:
    pathlib.Path("/given/new").write_text("")
    can_write = True
except OSError:
    can_write = False
print(json.dumps({
    "cwd": os.getcwd(),
    "passes": os.environ["PADDLE_INIT_NUM_PASSES"],
    "given": pathlib.Path("/given/text").read_text(),
    "can_write": can_write,
    "again": pathlib.Path("/again/part/text").read_text(),
}))
"""


@pytest.fixture
def node_folder(tmp_path: Path) -> Path:
    """A folder of the node with the file `text`."""
    (tmp_path / "text").write_text("by the node")
    tmp_path.chmod(0o777)
    return tmp_path


async def test_a_pod_has_what_the_manifest_specifies(cluster: Cluster, node_folder: Path) -> None:
    """Volumes with one and several mounts, environment, workspace, GPUs by their old name, labels and tolerations."""
    manifest = {
        "apiVersion": "paddlepaddle.org/v1",
        "kind": "TrainingJob",
        "metadata": {"name": "manifest", "labels": {"team": "vision"}, "annotations": {"owner": "Ada"}},
        "spec": {
            "image": cluster.image,
            "passes": 3,
            "port": 7164,
            "schedulerName": "default-scheduler",
            "volumes": [
                {"name": "given", "hostPath": {"path": str(node_folder)}},
                {"name": "shared", "emptyDir": {}},
            ],
            "VolumeMounts": [
                {"name": "given", "mountPath": "/given", "readOnly": True},
                {"name": "shared", "mountPath": "/out"},
                {"name": "shared", "mountPath": "/again"},
            ],
            "trainer": {
                "entrypoint": 'python -c "$SCRIPT"',
                "workspace": "/out",
                "min-instance": 1,
                "max-instance": 1,
                "envs": {"SCRIPT": PRINTS_JSON},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "node_selector": {"kubernetes.io/os": "linux"},
                "resources": {
                    "limits": {"cpu": "1", "memory": "200Mi", "alpha.kubernetes.io/nvidia-gpu": 1},
                    "requests": {"cpu": "20m", "memory": "100Mi"},
                },
            },
            "pserver": {"min-instance": 1, "max-instance": 1},
        },
    }
    (job,) = read_training_job(yaml.safe_dump(manifest), volumes="hostPath")
    spec = JobSpec(
        name=job.name,
        kind="trainer",
        command=tuple(job.trainer.command),
        bounds=Bounds(1, 1),
        instances=1,
        env=job.trainer.env,
        cwd=job.trainer.cwd,
        pod=job.trainer.pod,
    )
    backend = cluster.backend()
    await backend.submit(spec, token="mine", secrets={})
    try:
        status, lines = await _end_of(backend, "manifest")
        assert status.phase == "succeeded", (status, lines)
        assert json.loads(lines[-1]) == {
            "cwd": "/out",
            "passes": "3",
            "given": "by the node",
            "can_write": False,
            "again": "through the other mount",
        }
        pods = await cluster.request("GET", f"/api/v1/namespaces/{cluster.namespace}/pods?labelSelector=team%3Dvision")
        (pod,) = pods["items"]
        (container,) = pod["spec"]["containers"]
        assert container["resources"] == {
            "requests": {"cpu": "20m", "memory": "200Mi", "nvidia.com/gpu": "1"},
            "limits": {"memory": "200Mi", "nvidia.com/gpu": "1"},
        }
        assert pod["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}
        assert {"key": "gpu", "operator": "Exists"} in pod["spec"]["tolerations"]
        assert pod["metadata"]["annotations"]["owner"] == "Ada"
    finally:
        await backend.delete("manifest")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """The examples with their data, as an image would have them in /workspace, and a folder for checkpoints."""
    for name in ("elastic_train", "mnist_distill"):
        shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    load = "import sys; from pathlib import Path; from digits import load_digits; load_digits(Path(sys.argv[1]))"
    data = str(tmp_path / "elastic_train" / "data")
    subprocess.run([sys.executable, "-c", load, data], cwd=EXAMPLES / "mnist_distill", check=True)
    (tmp_path / "kept").mkdir()
    subprocess.run(["chmod", "-R", "a+rwX", str(tmp_path)], check=True)
    return tmp_path


def example_manifest(image: str, workspace: Path, passes: int = 2) -> Path:
    """Write the example with the folder as its workspace; return the file."""
    manifest = yaml.safe_load((EXAMPLES / "training_job" / "examplejob.yaml").read_text())
    spec = manifest["spec"]
    spec["image"] = image
    spec["volumes"] = [{"name": "workspace", "hostPath": {"path": str(workspace)}}]
    spec["VolumeMounts"] = [{"name": "workspace", "mountPath": "/workspace"}]
    spec["trainer"]["passes"] = passes
    spec["trainer"]["envs"] = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    spec["trainer"]["resources"] = {"requests": {"cpu": "20m"}, "limits": {"memory": "1Gi"}}
    file = workspace / "job.yaml"
    file.write_text(yaml.safe_dump(manifest))
    return file


@pytest.mark.deep
def test_the_example_trains_in_several_copies(
    cluster: Cluster, redis_service: RedisService, paddle_image: str, workspace: Path
) -> None:
    """As on one machine, but in pods of one image; each copy has its own checkpoints on a volume."""
    file = example_manifest(paddle_image, workspace)
    environ = cluster.environ(EDL_REDIS_URL=redis_service.url, EDL_REDIS_FOR_PODS=redis_service.address_in_cluster)
    edl = [sys.executable, "-P", "-m", "edl_runtime.cli"]
    submit = [*edl, "submit", "-f", str(file), "--checkpoint", "/workspace/kept"]
    backend = cluster.backend()
    names = ["example", "example-2"]
    try:
        for more in ([], ["--name", "example-2", "--start", "2"]):
            done = subprocess.run([*submit, *more], env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert "spec.pserver is ignored" in done.stderr
        for name in names:
            status, lines = asyncio.run(_end_of(backend, name))
            assert status.phase == "succeeded", (status, lines)
            assert any(line.startswith("step 100: loss") for line in lines), lines
            assert list((workspace / "kept" / name).iterdir())
    finally:
        for name in names:
            asyncio.run(backend.delete(name))
    assert asyncio.run(cluster.remaining_objects()) == []


@pytest.mark.deep
def test_a_deleted_trainingjob_continues_from_the_checkpoint_that_its_deletion_waited_for(
    cluster: Cluster, redis_service: RedisService, paddle_image: str, workspace: Path
) -> None:
    """By kubectl alone; no other checkpoint is due for minutes."""
    file = str(example_manifest(paddle_image, workspace, passes=1000))
    backend = cluster.backend()

    def trains_until(text: str) -> None:
        kubectl(cluster, "create", "-f", file)

        async def is_written() -> bool:
            try:
                return bool([line async for line in backend.logs("example") if line.text.startswith(text)])
            except UnknownJobError:  # it is not made yet
                return False

        asyncio.run(eventually(is_written, f"{text!r} in the log"))
        kubectl(cluster, "delete", "trainingjob", "example")

    flags = ("--no-rescale", "--checkpoint", "/workspace/kept")
    with trainingjobs_served(cluster), controller(cluster, redis_service, *flags, namespace=cluster.namespace):
        trains_until("step 100: loss")
        (step,) = steps_of(CheckpointStore(Checkpoint(url=str(workspace / "kept" / "example"))))
        assert step >= 100
        trains_until(f"continues from step {step} as one of 1")
    assert asyncio.run(cluster.remaining_objects()) == []


async def _end_of(backend: KubernetesBackend, name: str) -> tuple[JobStatus, list[str]]:
    status = await ended(backend, name, within_s=300)
    return status, [line.text async for line in backend.logs(name)]
