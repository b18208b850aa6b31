"""The random numbers of a training: kept in checkpoints, and other ones on each rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def capture() -> dict[str, Any]:
    """Return the states of Paddle's, numpy's and Python's generators, as JSON."""
    import paddle

    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 -- what scripts draw from
    return {
        "paddle": [[*state.__getstate__()[:3], bytes(state.__getstate__()[3]).decode()] for state in _states(paddle)],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "python": random.getstate(),
    }


def restore(captured: dict[str, Any]) -> None:
    """Go on drawing where `capture` was called. Raises ValueError or TypeError for what is no such state."""
    import paddle

    states: list[Any] = []
    for found, (*numbers, text) in zip(_states(paddle), captured["paddle"], strict=False):
        kind_of_state: Any = type(found)
        state = kind_of_state.__new__(kind_of_state)
        state.__setstate__((*numbers, list(text.encode())))
        states.append(state)
    if len(states) == len(_states(paddle)):  # else it ran on another number of devices
        paddle.set_rng_state(states)
    kind, keys, *rest = captured["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    version, internal, gauss = captured["python"]
    random.setstate((version, tuple(internal), gauss))


def seed_rank(base: int, generation: int, rank: int) -> None:
    """Begin anew on a rank that has joined: with numbers that no other rank draws, the same whenever it is repeated."""
    import paddle

    (seed,) = np.random.SeedSequence((base, generation, rank)).generate_state(1)
    paddle.seed(int(seed))
    np.random.seed(int(seed))  # noqa: NPY002
    random.seed(int(seed))


def _states(paddle: Any) -> list[Any]:
    states: list[Any] = paddle.get_rng_state()
    return states
