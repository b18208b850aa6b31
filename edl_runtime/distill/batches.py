"""What goes through the pipeline: a batch of the source, and the requests that its answers take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import numpy as np

from edl_runtime.distill.feeds import Answers, Feed, Plan
from edl_runtime.distill.recall import Memo, Recalled
from edl_runtime.distill.sizing import MOST_BYTES
from edl_runtime.protocol.tensors import Tensor

MOST_FAILURES = 5
LEAST_FAILING_S = 10.0
"""A request that was failed so often and so long is given up, if no teacher in use is left to try it. Until then it may
be the teachers: bad ones may be mended, and a student that has no good one is given another's."""


class Batch:
    """What is asked about together: items of the source. They are delivered once all its requests are answered.

    `plans` say what is asked of each pool. A batch holds no reference to its requests, which hold one to it: without
    a cycle, large arrays are freed at their last use and need no garbage collector.

    - `anew`: cuts its items into batches and requests of the usual size; None for one that is of that size.
    - `answers`: of each pool's requests, in order; None for those to come. `missing` counts these.
    - `answered_at`: when each pool answered last, in monotonic seconds.
    - `items`: how many rows each item of the source has; in format "sample" all rows are one piece.
    - `recalled`: what the cache has of each pool's answers; empty without a cache.
    - `awaited`: the training script waits for this batch.
    - `dropped`: its epoch is over; nobody wants it any more.
    - `failure`: what to raise in its place.
    - `name`: which it is of its epoch, in words.
    - `turn`: its place among all batches; that of a part of one begins with that one's.
    - `weight`: how much of the window it takes: the number of its requests, at least 1.
    """

    __slots__ = (
        "anew",
        "answered_at",
        "answered_by",
        "answers",
        "awaited",
        "dropped",
        "failure",
        "items",
        "missing",
        "name",
        "payload",
        "plans",
        "recalled",
        "samples",
        "turn",
        "weight",
    )

    def __init__(
        self,
        payload: Any,
        plans: Sequence[Plan],
        *,
        items: Sequence[int],
        requests: Sequence[int],
        recalled: Sequence[Recalled] = (),
        name: str = "a batch",
    ) -> None:
        """Have so many `requests` to each pool."""
        self.name = name
        self.payload = payload
        self.plans = plans
        self.items = items
        self.samples = sum(items)
        self.missing = sum(requests)
        self.weight = self.missing or 1
        self.answers: tuple[list[Answers | None], ...] = tuple([None] * count for count in requests)
        self.answered_at = [0.0] * len(requests)
        self.recalled = recalled
        self.answered_by: list[str] = []  # an address for each answer, in no order
        self.awaited = False
        self.dropped = False
        self.failure: BaseException | None = None
        self.turn: tuple[int, ...] = ()
        self.anew: Callable[[], Iterable[tuple[Batch, Sequence[Sequence[Request]]]]] | None = None

    @property
    def cached(self) -> int:
        """About how many samples no teacher is asked."""
        return self.samples - len(set().union(*(pool.missing for pool in self.recalled))) if self.recalled else 0

    def lacks(self, pool: int) -> bool:
        """Whether this pool has yet to answer a request."""
        return None in self.answers[pool]


class Failures(NamedTuple):
    """How often each teacher failed a request, by address, and the monotonic time of the first failure."""

    since: float
    by: Counter[str]


class Request:
    """What one teacher of the `pool`-th pool is asked at once: `rows` rows of `inputs`, the `index`-th part of `batch`.

    - `deaths`: the teachers whose predictors died under it.
    - `hedged`: a second teacher is asked since the first takes long; no third one is for that reason.
    - `memo`: where its answers are to be kept, if anywhere.
    """

    __slots__ = ("batch", "deaths", "failures", "hedged", "index", "inputs", "memo", "pool", "rows")

    def __init__(
        self, batch: Batch, pool: int, index: int, inputs: Mapping[str, Tensor], rows: int, *, memo: Memo | None = None
    ) -> None:
        self.batch = batch
        self.pool = pool
        self.index = index
        self.inputs = inputs
        self.rows = rows
        self.memo = memo
        self.hedged = False
        self.deaths: tuple[str, ...] = ()
        self.failures: Failures | None = None

    @property
    def name(self) -> str:
        """Which it is of its epoch, in words."""
        parts = len(self.batch.answers[self.pool])
        return f"part {self.index + 1} of {parts} of {self.batch.name}" if parts > 1 else self.batch.name

    @property
    def turn(self) -> tuple[tuple[int, ...], int]:
        """Its place among the requests to the pool, in the order of the source."""
        return self.batch.turn, self.index

    @property
    def row_bytes(self) -> float:
        """How many bytes a row has."""
        return _nbytes(self.inputs.values()) / self.rows

    @property
    def settled(self) -> bool:
        """Whether no answer is wanted any more."""
        batch = self.batch
        return batch.dropped or batch.failure is not None or batch.answers[self.pool][self.index] is not None

    def answer(self, address: str, answers: Answers, now: float) -> None:
        """Note the answers of a teacher; only the first count."""
        self.batch.answers[self.pool][self.index] = answers
        self.batch.answered_at[self.pool] = now
        self.batch.answered_by.append(address)
        self.batch.missing -= 1

    def fail(self, address: str, now: float) -> None:
        """Note that a teacher failed it."""
        if self.failures is None:
            self.failures = Failures(now, Counter())
        self.failures.by[address] += 1

    @property
    def failed_by(self) -> AbstractSet[str]:
        """The addresses of the teachers that failed it."""
        return self.failures.by.keys() if self.failures is not None else frozenset()

    def is_hopeless(self, in_use: AbstractSet[str], now: float) -> bool:
        """Whether the request is what is wrong, and not the teachers: whichever is asked fails it, again and again."""
        failures = self.failures
        if failures is None or failures.by.total() < MOST_FAILURES or now - failures.since < LEAST_FAILING_S:
            return False
        return len(failures.by) >= MOST_FAILURES or self.failed_by >= in_use


def requests_of(
    payload: Any,
    plans: Sequence[Plan],
    items: Sequence[int],
    inputs: Mapping[Feed, Tensor],
    *,
    size: int | None,
    most_rows: int,
    recalled: Sequence[Recalled] = (),
    name: str = "a batch",
) -> tuple[Batch, list[list[Request]]]:
    """Return a batch of `items` with so many rows, and its requests, for each plan: about rows that are not recalled.

    A request has `size` rows, or by default as many as `most_rows` and `MOST_BYTES` allow.
    """
    rows = sum(items)
    wanted: list[Sequence[int]] = [pool.missing for pool in recalled] or [range(rows)] * len(plans)
    at_once = [size or _rows_a_request([inputs[feed] for feed in plan.feeds], rows, most_rows) for plan in plans]
    counts = [-(-len(asked) // rows_of_one) for asked, rows_of_one in zip(wanted, at_once, strict=True)]
    batch = Batch(payload, plans, items=items, requests=counts, recalled=recalled, name=name)
    requests: list[list[Request]] = []
    for pool, (plan, asked, rows_of_one) in enumerate(zip(plans, wanted, at_once, strict=True)):
        tensors = [(feed.name, inputs[feed]) for feed in plan.feeds]
        of_pool = []
        for index in range(counts[pool]):
            part = asked[index * rows_of_one : (index + 1) * rows_of_one]
            memo = recalled[pool].memo(part) if recalled else None
            picked = _picked(tensors, part)
            of_pool.append(Request(batch, pool, index, picked, len(part), memo=memo))
        requests.append(of_pool)
    return batch, requests


def _rows_a_request(tensors: Sequence[Tensor], rows: int, most_rows: int) -> int:
    """Return how many of the rows go into one request, so that none is much smaller than the others."""
    requests = max(-(-rows // most_rows), -(-_nbytes(tensors) // MOST_BYTES), 1)
    return max(1, -(-rows // requests))


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.nbytes if isinstance(one, np.ndarray) else sum(row.nbytes for row in one) for one in tensors)


def _picked(tensors: Sequence[tuple[str, Tensor]], rows: Sequence[int]) -> dict[str, Tensor]:
    """Return these rows of each; they are not copied if they are neighbours."""
    if isinstance(rows, range):
        neighbours = slice(rows.start, rows.stop)
        return {name: tensor[neighbours] for name, tensor in tensors}
    return {
        name: tensor[rows] if isinstance(tensor, np.ndarray) else [tensor[row] for row in rows]
        for name, tensor in tensors
    }
