"""The training script that `resize.py` gives to `torchrun`; needs PyTorch and nothing of this project.

It resumes from a checkpoint, which it writes once: the cost of checkpoints and of repeated steps is not measured.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from _elastic_script import BATCH, WIDTH, Script

SAVED_AT = 10


def main() -> None:
    script = Script()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    began = torch.tensor([time.time_ns()])
    dist.broadcast(began, 0)  # a generation's number: the time at which its rank 0 began
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(script.layers)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    step = 0
    if script.checkpoint.exists():
        state = torch.load(script.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = SAVED_AT
    together = torch.nn.parallel.DistributedDataParallel(model)
    batch = torch.ones(BATCH // world_size, WIDTH)
    while True:
        script.work(lambda: layers[0](batch))
        together(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        script.log_step(generation=int(began.item()), rank=rank, world_size=world_size, step=step)
        if rank == 0 and step == SAVED_AT and not script.checkpoint.exists():
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, script.checkpoint.with_suffix(".new"))
            script.checkpoint.with_suffix(".new").replace(script.checkpoint)


if __name__ == "__main__":
    main()
