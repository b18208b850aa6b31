"""Elastic training: workers join and leave a running job. Training scripts call `init`; see `Run`.

Imports are lazy: the agent imports submodules and does not need Paddle.
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
