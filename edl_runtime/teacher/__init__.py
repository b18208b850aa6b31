"""Teachers serve a model to students. `served` marks a Python function as a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl_runtime.protocol.oip import TensorSpec
    from edl_runtime.teacher.models.callable import served

__all__ = ["TensorSpec", "served"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edl_runtime.protocol.oip import TensorSpec
    from edl_runtime.teacher.models.callable import served

    return {"TensorSpec": TensorSpec, "served": served}[name]
