"""Service distillation from the student's side: batches of a source, with teachers' answers appended.

What is named here is imported when it is used: a DAG file that only needs this package's errors loads no numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl_runtime.distill.cache.answer_cache import AnswerCache
    from edl_runtime.distill.reader import DistillReader
    from edl_runtime.distill.reporter import JobReporter
    from edl_runtime.distill.stats import ReaderStats
    from edl_runtime.distill.teachers import Discovered, Fixed
    from edl_runtime.protocol.oip import Normalise, TopK

__all__ = ["AnswerCache", "Discovered", "DistillReader", "Fixed", "JobReporter", "Normalise", "ReaderStats", "TopK"]

_MODULES = {
    "AnswerCache": "edl_runtime.distill.cache.answer_cache",
    "Discovered": "edl_runtime.distill.teachers",
    "DistillReader": "edl_runtime.distill.reader",
    "Fixed": "edl_runtime.distill.teachers",
    "JobReporter": "edl_runtime.distill.reporter",
    "Normalise": "edl_runtime.protocol.oip",
    "ReaderStats": "edl_runtime.distill.stats",
    "TopK": "edl_runtime.protocol.oip",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
