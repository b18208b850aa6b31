"""Sets of pods: where pods are, and how they change."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from edl_runtime.demo.pod_sets import DEFAULT_JOB, Nodes, Pod, PodSet, first_pods, job_name, next_pods
from edl_runtime.errors import SpecError

NODES = Nodes(("10.0.0.1", "10.0.0.2"), pods=2, gpus=4)


def test_pods_share_their_nodes_gpus_and_ports() -> None:
    """As the original numbers them: ranks over nodes, ports from 8070 on each node, a trainer for each GPU."""
    pods = first_pods(NODES, DEFAULT_JOB)
    assert (pods.job_id, pods.job_stage_flag, pods.trainers_limit) == ("test_job_id_1234", -1, 8)
    assert [pod.pod_id for pod in pods.pods] == ["pod_0_0", "pod_1_0", "pod_2_0", "pod_3_0"]
    assert msgspec.to_builtins(pods.pods[3]) == {
        "pod_id": "pod_3_0",
        "running": True,
        "addr": "10.0.0.2",
        "pod_port": 8073,
        "trainer_ports": (8074, 8075),
        "gpus": (2, 3),
    }
    (alone,) = first_pods(Nodes(("h",), pods=1, gpus=0), "j").pods
    assert (alone.gpus, alone.trainer_ports) == ((), (8071,)), "one trainer on CPUs"


def ids(pods: PodSet) -> list[str]:
    return [pod.pod_id.removeprefix("pod_") for pod in pods.pods]


def test_the_last_pods_leave_and_others_come_by_turns() -> None:
    """New pods have the stage's number in their ids, and the places of those that left."""
    stages = [first_pods(NODES, "j")]
    for _ in range(4):
        stages.append(next_pods(NODES, stages[-1], delete=2, add=1))
    assert [pods.job_stage_flag for pods in stages] == [-1, 0, 1, 2, 3]
    assert [ids(pods) for pods in stages[1:]] == [
        ["0_0", "1_0"],
        ["0_0", "1_0", "2_1"],
        ["0_0"],
        ["0_0", "1_3"],
    ]
    assert stages[2].pods[2].addr == "10.0.0.2"
    assert stages[2].rank("pod_2_1") == 2
    assert stages[3].rank("pod_2_1") is None


def test_one_pod_stays_and_no_node_gets_more_than_it_has_room_for() -> None:
    """Whatever numbers are asked for."""
    fewest = next_pods(NODES, first_pods(NODES, "j"), delete=9, add=9)
    assert ids(fewest) == ["0_0"]
    assert len(next_pods(NODES, fewest, delete=9, add=9).pods) == 4


@pytest.mark.parametrize(
    ("addresses", "pods", "gpus", "field"),
    [((), 1, 1, "node_ips"), (("a", "a"), 1, 1, "node_ips"), (("a",), 0, 1, "pod_num"), (("a",), 3, 4, "gpu_num")],
)
def test_nodes_that_can_not_be_are_refused(addresses: tuple[str, ...], pods: int, gpus: int, field: str) -> None:
    with pytest.raises(SpecError, match=field):
        Nodes(addresses, pods, gpus)


@pytest.mark.parametrize(
    "wrong",
    [{"pod_id": word} for word in ("../x", "/tmp", "a/b", "..", "a\0b", "pod_0_0\n", "", "$(x)", "x" * 200)]
    + [{"gpus": [-1]}, {"trainer_ports": []}],
)
def test_pods_of_a_server_that_are_no_pods_are_refused(wrong: dict[str, Any]) -> None:
    """Their ids are parts of paths."""
    (pod,) = first_pods(Nodes(("h",), pods=1, gpus=1), "j").pods
    right = msgspec.to_builtins(pod)
    assert msgspec.convert(right, Pod, strict=False) == pod
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(right | wrong), type=Pod)


def test_ids_become_names_of_jobs() -> None:
    assert job_name("test_job_id_1234") == "test-job-id-1234"
    with pytest.raises(SpecError, match="PADDLE_JOB_ID"):
        job_name("__")
