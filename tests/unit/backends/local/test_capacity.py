"""What local instances are given of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl_runtime.backends.interface import InstanceStatus, JobStatus, NodeCapacity, Phase, Scaling
from edl_runtime.backends.local.backend import NODE_NAME, free_capacity, inherited_environment, scaling_of
from edl_runtime.pods import Pod
from edl_runtime.settings import count_gpus
from edl_runtime.specs import Bounds, JobSpec


def test_only_what_programs_need_passes_to_instances() -> None:
    """The environment is chosen by what is known to be harmless, so that no new kind of secret slips through."""
    harmless = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "PYTHONPATH": "/lib",
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "1",
    }
    secret = {"AIRFLOW__CORE__FERNET_KEY": "x", "_AIRFLOW_X": "x", "EDL_REDIS_URL": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    assert inherited_environment(harmless | secret) == harmless


@pytest.mark.parametrize(
    ("visible", "gpus"), [("", 0), ("-1", 0), ("0", 1), ("0,1", 2), ("0,-1,1", 1), ("GPU-1a,MIG-2", 2)]
)
def test_visible_gpus_are_counted_as_cuda_does(tmp_path: Path, visible: str, gpus: int) -> None:
    """The variable wins over the driver, and ends at its first invalid entry."""
    (tmp_path / "0000:01:00.0").mkdir()
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == gpus


def test_without_the_variable_the_driver_is_asked(tmp_path: Path) -> None:
    """A machine without the driver has no GPUs."""
    (tmp_path / "0000:01:00.0").mkdir()
    assert count_gpus({}, tmp_path) == 1
    assert count_gpus({}, tmp_path / "nothing") == 0


def running(resources: dict[str, float], wanted: int, phases: tuple[Phase, ...]) -> JobStatus:
    """Return the status of a job whose instances beyond those that are wanted are leaving."""
    instances = tuple(
        InstanceStatus(index=index, phase=phase, started_at=1.0, node=NODE_NAME, leaving=index >= wanted)
        for index, phase in enumerate(phases)
    )
    scaling = Scaling(bounds=Bounds(1, 9), resources=resources)
    told = {"name": "job", "token": "t", "digest": "d", "created_at": 1.0}
    return JobStatus(**told, kind="pool", phase="running", wanted=wanted, scaling=scaling, instances=instances)


def test_what_is_free_is_beside_instances_that_stay() -> None:
    """Those that leave count as gone, those that have ended as well, and what nobody knows of is left out."""
    total = {"cpu": 8.0, "memory": 100.0, "gpu": 2.0}
    jobs = [
        running({"cpu": 0.5, "rdma/hca": 1.0}, 2, ("running", "running", "running")),
        running({"cpu": 1.0, "memory": 60.0}, 2, ("running", "failed")),
        running({"gpu": 1.0}, 0, ("running",)),
    ]
    assert free_capacity(jobs, total).nodes == (
        NodeCapacity(name=NODE_NAME, total=total, free={"cpu": 6.0, "memory": 40.0, "gpu": 2.0}),
    )
    assert free_capacity([running({"cpu": 9.0}, 1, ("running",))], total).nodes[0].free["cpu"] == 0


@pytest.mark.parametrize(
    ("pod", "resources"),
    [
        (None, {"cpu": 1.0}),
        (Pod(image="i:1"), {"cpu": 1.0}),
        (Pod(resources={"cpu": 0}), {"cpu": 1.0}),
        (Pod(resources={"memory": "1Gi", "cpu": 0}), {"memory": float(1 << 30)}),
        (
            Pod(resources={"cpu": "1500m", "nvidia.com/gpu": 2, "rdma/hca": 1}),
            {"cpu": 1.5, "gpu": 2.0},
        ),
        (Pod(resources={"rdma/hca": 1}), {"cpu": 1.0}),
    ],
)
def test_an_instance_reserves_what_its_pod_would_or_a_core(pod: Pod | None, resources: dict[str, float]) -> None:
    """Of what there is here at all, so that there is always something to plan with and nothing waits in vain."""
    spec = JobSpec(name="job", kind="pool", command=("t",), bounds=Bounds(1, 1), instances=1, pod=pod)
    assert scaling_of(spec, {"cpu": 2.0, "memory": 8e9, "gpu": 4.0}).resources == resources
