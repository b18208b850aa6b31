"""The training script that `resize.py` gives to `edl agent`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
from _elastic_script import BATCH, WIDTH, Script

from edl_runtime import elastic

SAMPLES = 30_000


def main() -> None:
    script = Script()
    run = elastic.init()

    class Adam(paddle.optimizer.Adam):
        """Logs a step when it is applied: `run.step` may return much later, in the next generation."""

        def step(self) -> Any:
            super().step()
            script.log_step(
                generation=run.generation, rank=run.rank, world_size=run.world_size, step=run.step_number + 1
            )

    layers = [paddle.nn.Linear(WIDTH, WIDTH, bias_attr=False) for _ in range(script.layers)]
    model = paddle.nn.Sequential(*layers)
    run.wrap(model, Adam(1e-6, parameters=model.parameters()))
    for batch in run.data([np.ones(WIDTH, np.float32)] * SAMPLES, global_batch=BATCH, epochs=1000):
        script.work(functools.partial(layers[0], batch))
        loss = model(batch).square().mean()
        loss.backward()
        run.step(loss=loss)


if __name__ == "__main__":
    main()
