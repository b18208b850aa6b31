"""Service distillation from the student's side: batches of a source, with teachers' answers appended."""

from edl_runtime.distill.cache.answer_cache import AnswerCache
from edl_runtime.distill.reader import DistillReader
from edl_runtime.distill.reporter import JobReporter
from edl_runtime.distill.stats import ReaderStats
from edl_runtime.distill.teachers import Discovered, Fixed
from edl_runtime.protocol.oip import Normalise, TopK

__all__ = ["AnswerCache", "Discovered", "DistillReader", "Fixed", "JobReporter", "Normalise", "ReaderStats", "TopK"]
