"""Elastic training: workers join and leave a running job. Training scripts call `init`; see `Run`.

Imports are lazy: the agent imports submodules and does not need Paddle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edl_runtime.elastic import script_exit
from edl_runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from edl_runtime.elastic.api import Run, init, schedule_steps
    from edl_runtime.specs import Checkpoint

__all__ = ["Checkpoint", "Run", "init", "schedule_steps"]

script_exit.watch()

__getattr__ = lazy_exports(
    __name__,
    {
        "Checkpoint": "edl_runtime.specs",
        "Run": "edl_runtime.elastic.api",
        "init": "edl_runtime.elastic.api",
        "schedule_steps": "edl_runtime.elastic.api",
    },
)
