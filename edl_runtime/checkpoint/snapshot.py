"""A training's whole state at the end of a step, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np

Arrays: TypeAlias = Mapping[str, Mapping[str, np.ndarray]]
"""Arrays by group ("model", "optimizer") and name. A group's name is one of a file: a-z, 0-9, '_' and '-'."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds.

    - `generation`, `step`: which training it is of, and after how many of its steps. They order checkpoints.
    - `arrays`: may be views of memory that the next step changes: whoever takes the snapshot copies them. bfloat16
      comes and goes as uint16, as Paddle's own `numpy()` and `set_value` have it.
    - `extra`: all else, as JSON: cursor, learning rate, state of random numbers, ledger.
    - `world_size`, `epoch`, `metrics`: for whoever looks at checkpoints without loading them.
    """

    generation: int
    step: int
    arrays: Arrays
    extra: dict[str, Any] = {}
    world_size: int = 1
    epoch: int = 0
    metrics: dict[str, float] = {}
