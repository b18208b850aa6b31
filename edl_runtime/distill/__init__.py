"""Service distillation from the student's side: batches of a source, with teachers' answers appended.

Imports are lazy: a DAG file that only needs this package's errors loads no numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edl_runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from edl_runtime.distill.cache.answer_cache import AnswerCache
    from edl_runtime.distill.reader import DistillReader
    from edl_runtime.distill.reporter import JobReporter
    from edl_runtime.distill.stats import ReaderStats
    from edl_runtime.distill.teacher_addresses import Discovered, Fixed
    from edl_runtime.protocol.oip import Normalise, TopK

__all__ = ["AnswerCache", "Discovered", "DistillReader", "Fixed", "JobReporter", "Normalise", "ReaderStats", "TopK"]

__getattr__ = lazy_exports(
    __name__,
    {
        "AnswerCache": "edl_runtime.distill.cache.answer_cache",
        "Discovered": "edl_runtime.distill.teacher_addresses",
        "DistillReader": "edl_runtime.distill.reader",
        "Fixed": "edl_runtime.distill.teacher_addresses",
        "JobReporter": "edl_runtime.distill.reporter",
        "Normalise": "edl_runtime.protocol.oip",
        "ReaderStats": "edl_runtime.distill.stats",
        "TopK": "edl_runtime.protocol.oip",
    },
)
