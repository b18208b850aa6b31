"""The pods of a job and how they change from stage to stage. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.specs import name_from

DEFAULT_JOB = "test_job_id_1234"
FIRST_PORT = 8070


PodId = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")]
"""It is part of files' names."""


class Pod(msgspec.Struct, frozen=True):
    """A pod of a job, as the JobServer's JSON has it.

    - `pod_id`: "pod_RANK_STAGE", with the stage that added it.
    - `running`: False once its client has reported that its script has ended.
    - `addr`: its node. `pod_port`, `trainer_ports`: EDL's; here trainers choose free ports.
    - `gpus`: their numbers on the node; one trainer has one.
    """

    pod_id: PodId
    running: bool
    addr: str
    pod_port: int
    trainer_ports: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    gpus: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]

    @property
    def trainers(self) -> int:
        """How many trainers it has: one for each GPU, or one."""
        return max(1, len(self.gpus))


class PodSet(msgspec.Struct, frozen=True):
    """A job's pods by rank. `job_stage_flag`: how often they have changed, from -1.

    `trainers_limit`: the most trainers that all pods may have.
    """

    job_id: str
    job_stage_flag: int
    pods: tuple[Pod, ...]
    trainers_limit: Annotated[int, msgspec.Meta(ge=1)]

    def rank(self, pod_id: str) -> int | None:
        """Return that pod's rank, None for a pod that is not one of them."""
        return next((rank for rank, pod in enumerate(self.pods) if pod.pod_id == pod_id), None)

    def with_ended(self, ended: Collection[str]) -> PodSet:
        """Return them with these marked as not running."""
        pods = tuple(msgspec.structs.replace(pod, running=pod.pod_id not in ended) for pod in self.pods)
        return msgspec.structs.replace(self, pods=pods)


class Nodes(msgspec.Struct, frozen=True):
    """Nodes that are alike, and how their GPUs are divided among pods. Raises SpecError."""

    addresses: tuple[str, ...]
    pods: int
    """Of each node."""
    gpus: int
    """Of each node; 0 for pods of one trainer on CPUs."""

    def __post_init__(self) -> None:
        if not self.addresses or len(set(self.addresses)) < len(self.addresses):
            raise SpecError("node_ips", ",".join(self.addresses), "addresses, each once, as in 10.0.0.1,10.0.0.2")
        if self.pods < 1:
            raise SpecError("pod_num_of_node", self.pods, "1 or more")
        if self.gpus < 0 or self.gpus % self.pods:
            raise SpecError("gpu_num_of_node", self.gpus, f"0, or a multiple of pod_num_of_node, {self.pods}")

    @property
    def pods_limit(self) -> int:
        """How many pods all nodes have room for."""
        return len(self.addresses) * self.pods

    def place(self, pod_id: str, rank: int) -> Pod:
        """Return the pod of that rank: the first ranks are on the first node."""
        node, slot = divmod(rank, self.pods)
        gpus = self.gpus // self.pods
        trainers = max(1, gpus)
        port = FIRST_PORT + slot * (1 + trainers)
        return Pod(
            pod_id=pod_id,
            running=True,
            addr=self.addresses[node],
            pod_port=port,
            trainer_ports=tuple(range(port + 1, port + 1 + trainers)),
            gpus=tuple(range(slot * gpus, (slot + 1) * gpus)),
        )


def first_pods(nodes: Nodes, job_id: str) -> PodSet:
    """Return as many pods as there is room for, at stage -1."""
    pods = tuple(nodes.place(f"pod_{rank}_0", rank) for rank in range(nodes.pods_limit))
    return PodSet(job_id, -1, pods, nodes.pods_limit * len(pods[0].trainer_ports))


def next_pods(nodes: Nodes, before: PodSet, *, delete: int, add: int) -> PodSet:
    """Return the next stage's pods: without the last `delete` at stages 0, 2, 4…, with `add` more at the others.

    At least one pod stays, and no more are added than there is room for.
    """
    stage = before.job_stage_flag + 1
    if stage % 2:
        ranks = range(len(before.pods), min(len(before.pods) + add, nodes.pods_limit))
        pods = (*before.pods, *(nodes.place(f"pod_{rank}_{stage}", rank) for rank in ranks))
    else:
        pods = before.pods[: max(1, len(before.pods) - delete)]
    return msgspec.structs.replace(before, job_stage_flag=stage, pods=pods)


def job_name(job_id: str) -> str:
    """Return the name of the elastic job: the id in small letters, with hyphens for all but letters and digits."""
    name = name_from(job_id)
    if not name:
        raise SpecError("job_id (PADDLE_JOB_ID)", job_id, "an id with letters or digits, as in test_job_id_1234")
    return name
