"""What goes through the pipeline: a batch of the source, and the requests that its answers take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edl_runtime.distill.feeds import Answers, Plan
from edl_runtime.protocol.tensors import Tensor


class Batch:
    """What the source gave in one piece. It is delivered whole, when all its requests are answered as `plan` has it.

    Doesn't know its requests, so that large arrays are freed with their last use and not by the garbage collector.
    """

    __slots__ = ("answers", "missing", "payload", "plan", "samples")

    def __init__(self, payload: Any, plan: Plan, *, samples: int, requests: int) -> None:
        self.payload = payload
        self.plan = plan
        self.samples = samples
        self.missing = requests
        self.answers: list[Answers | None] = [None] * requests


class Request:
    """What one teacher is asked at once: `rows` rows of each of `inputs`, the `index`-th part of `batch`."""

    __slots__ = ("batch", "index", "inputs", "rows")

    def __init__(self, batch: Batch, index: int, inputs: Mapping[str, Tensor], rows: int) -> None:
        self.batch = batch
        self.index = index
        self.inputs = inputs
        self.rows = rows

    @property
    def answered(self) -> bool:
        return self.batch.answers[self.index] is not None
