"""What goes through the pipeline: a batch of the source, and the requests that its answers take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from edl_runtime.distill.feeds import Answers, Plan
from edl_runtime.protocol.tensors import Tensor

MOST_FAILURES = 5
LEAST_FAILING_S = 1.0
"""A request that was failed so often and so long is given up, if no teacher in use is left to try it."""


class Batch:
    """What the source gave in one piece. It is delivered whole, once all its requests are answered.

    `plan` says what is asked for. A batch holds no reference to its requests, which hold one to it: without a cycle,
    large arrays are freed at their last use and need no garbage collector.
    """

    __slots__ = ("answered_by", "answers", "missing", "payload", "plan", "samples")

    def __init__(self, payload: Any, plan: Plan, *, samples: int, requests: int) -> None:
        self.payload = payload
        self.plan = plan
        self.samples = samples
        self.missing = requests
        self.answers: list[Answers | None] = [None] * requests
        self.answered_by: list[str] = []  # an address for each answer, in no order

    @property
    def weight(self) -> int:
        """How much of the window it takes: the number of its requests, at least 1."""
        return len(self.answers) or 1


class Failures(NamedTuple):
    """How often each teacher failed a request, by address, and the monotonic time of the first failure."""

    since: float
    by: Counter[str]


class Request:
    """What one teacher is asked at once: `rows` rows of each of `inputs`, the `index`-th part of `batch`."""

    __slots__ = ("batch", "failures", "index", "inputs", "rows")

    def __init__(self, batch: Batch, index: int, inputs: Mapping[str, Tensor], rows: int) -> None:
        self.batch = batch
        self.index = index
        self.inputs = inputs
        self.rows = rows
        self.failures: Failures | None = None

    @property
    def answered(self) -> bool:
        return self.batch.answers[self.index] is not None

    def answer(self, address: str, answers: Answers) -> None:
        """Note the answers of a teacher; only the first count."""
        self.batch.answers[self.index] = answers
        self.batch.answered_by.append(address)
        self.batch.missing -= 1

    def fail(self, address: str, now: float) -> None:
        """Note that a teacher failed it."""
        if self.failures is None:
            self.failures = Failures(now, Counter())
        self.failures.by[address] += 1

    def is_hopeless(self, in_use: Collection[str], now: float) -> bool:
        """Whether the request is what is wrong, and not the teachers: whichever is asked fails it, again and again."""
        failures = self.failures
        if failures is None or failures.by.total() < MOST_FAILURES or now - failures.since < LEAST_FAILING_S:
            return False
        return len(failures.by) >= MOST_FAILURES or failures.by.keys() >= set(in_use)
