"""A script with PyTorch's DistributedDataParallel as in tutorials, which resumes from its own checkpoints."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 150


def main(out: Path) -> None:
    """Train with a checkpoint of each step, and save this rank's weights in `out`."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept, done = out / "kept.pt", 0
    if kept.exists():
        state = torch.load(kept)
        model.load_state_dict(state["model"])
        done = state["step"]
    parallel = DistributedDataParallel(model)
    dist.barrier()  # all have read it before rank 0 writes the next
    print(f"rank {rank} of {world_size} resumes from step {done}", flush=True)  # noqa: T201 -- as scripts do
    for step in range(done + 1, STEPS + 1):
        optimizer.zero_grad()
        parallel(torch.full((2, 4), float(rank + step % 7))).mean().backward()
        optimizer.step()
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step}, out / "kept.partial")
            (out / "kept.partial").replace(kept)
        time.sleep(float(os.environ.get("STEP_S", "0.1")))
    dist.barrier()
    dist.destroy_process_group()
    (out / f"rank-{rank}-of-{world_size}").write_text(str(model.weight.tolist()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
