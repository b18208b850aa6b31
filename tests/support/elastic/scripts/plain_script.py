"""A script with paddle.DataParallel as in tutorials, without elasticity."""

from __future__ import annotations

import sys
from pathlib import Path

import paddle
import paddle.distributed as dist


def main(out: Path) -> None:
    """Do five steps, and save this rank's weights in `out`."""
    dist.init_parallel_env()
    paddle.seed(7)
    model = paddle.DataParallel(paddle.nn.Linear(4, 1))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    for step in range(5):
        inputs = paddle.full([2, 4], 1.0 + dist.get_rank() + step)
        model(inputs).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    weights = model.state_dict()["weight"].numpy().tolist()
    (out / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}").write_text(str(weights))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
