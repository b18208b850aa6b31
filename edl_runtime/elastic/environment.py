"""What a script that knows nothing of this project is told of its generation: the variables of both worlds. Pure."""

from __future__ import annotations

from typing import Literal

from edl_runtime.elastic.generation import Generation

Communication = Literal["gloo", "nccl"]


def plain_environment(generation: Generation, member: str, communication: Communication) -> dict[str, str]:
    """Return the variables by which `paddle.distributed` and `torch.distributed` join the generation as this member.

    Each instance has one trainer, and with "nccl" one device, the first that it sees.
    """
    rank = generation.members.index(member)
    world_size = str(len(generation.members))
    host, _, port = generation.store.rpartition(":")
    device = {"FLAGS_selected_gpus": "0", "PADDLE_LOCAL_DEVICE_IDS": "0"} if communication == "nccl" else {}
    return {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": world_size,
        "PADDLE_TRAINER_ENDPOINTS": ",".join(generation.endpoints),
        "PADDLE_CURRENT_ENDPOINT": generation.endpoints[rank],
        "PADDLE_MASTER": generation.store,
        "PADDLE_DISTRI_BACKEND": communication,
        "PADDLE_RANK_IN_NODE": "0",
        **device,
        "RANK": str(rank),
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": world_size,
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "EDL_GENERATION": str(generation.number),
    }
