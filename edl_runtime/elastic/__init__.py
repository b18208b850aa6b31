"""Elastic training: trainers join and leave a running job, nothing is lost or doubled.

What a training script calls is `init`; see `Run`. The agent, which needs neither, doesn't wait for their imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl_runtime.elastic.api import Run, init
    from edl_runtime.specs import Checkpoint

__all__ = ["Checkpoint", "Run", "init"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edl_runtime.elastic import api

    return getattr(api, name)
