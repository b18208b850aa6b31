"""Teachers serve a model to students. `served` marks a Python function as a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edl_runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from edl_runtime.protocol.oip import TensorSpec
    from edl_runtime.teacher.models.callable import served

__all__ = ["TensorSpec", "served"]

__getattr__ = lazy_exports(
    __name__, {"TensorSpec": "edl_runtime.protocol.oip", "served": "edl_runtime.teacher.models.callable"}
)
