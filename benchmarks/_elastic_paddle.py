"""The training script that `resize.py` gives to `paddle.distributed.launch`: as `_elastic_torch.py`, in Paddle."""

from __future__ import annotations

import time

import paddle
import paddle.distributed as dist
from _elastic_script import BATCH, WIDTH, Script

SAVED_AT = 10


def main() -> None:
    script = Script()
    dist.init_parallel_env()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    began = paddle.to_tensor([time.time_ns()])
    dist.broadcast(began, 0)  # a generation's number: the time at which its rank 0 began
    layers = [paddle.nn.Linear(WIDTH, WIDTH, bias_attr=False) for _ in range(script.layers)]
    model = paddle.nn.Sequential(*layers)
    optimizer = paddle.optimizer.Adam(1e-6, parameters=model.parameters())
    step = 0
    if script.checkpoint.exists():
        state = paddle.load(str(script.checkpoint))
        model.set_state_dict(state["model"])
        optimizer.set_state_dict(state["optimizer"])
        step = SAVED_AT
    together = paddle.DataParallel(model)
    batch = paddle.ones([BATCH // world_size, WIDTH])
    while True:
        script.work(lambda: layers[0](batch))
        together(batch).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        step += 1
        script.log_step(generation=int(began.numpy()[0]), rank=rank, world_size=world_size, step=step)
        if rank == 0 and step == SAVED_AT and not script.checkpoint.exists():
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            paddle.save(state, str(script.checkpoint.with_suffix(".new")))
            script.checkpoint.with_suffix(".new").replace(script.checkpoint)


if __name__ == "__main__":
    main()
