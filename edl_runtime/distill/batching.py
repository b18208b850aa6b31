"""The source's items: collected into pieces, cut into requests, and joined with the answers again.

| format | the source yields | the reader yields |
| --- | --- | --- |
| sample | (image, label) | (image, label, *answers), one at a time |
| sample_list | [(image, label), …] | [(image, label, *answers), …], as long as the source's list |
| batch | (images[B, …], labels[B, …]) | (images, labels, *answers[B, …]) |
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from edl_runtime.distill.bindings import Answers, InputBinding, OutputBinding, RequestPlan, SampleName, SlotArrays
from edl_runtime.distill.cache.lookup import CachedAnswers, CacheLookup, CacheWriter
from edl_runtime.distill.dispatch_policy import DEFAULT_ROWS, MAX_REQUEST_BYTES
from edl_runtime.distill.errors import SampleError
from edl_runtime.protocol.tensors import Array, Tensor

ACCUMULATE_S = 0.002
"""More items than the least are gathered only if the source has them at once."""


class ItemAccumulator:
    """The items of one epoch that are not asked about yet; safe from any thread.

    Pieces have `least` items times a power of two, up to `most()`: few batch sizes occur then, and a new one costs a
    teacher several runs. A script that waits calls `flush`: the source may itself wait for the script to go on.

    - `emit`: takes a piece; False when no more are wanted. Pieces are given one after the other, in order.
    """

    def __init__(self, least: int, most: Callable[[], int], emit: Callable[[list[Any]], bool]) -> None:
        self._least = least
        self._most = most
        self._emit = emit
        self._lock = threading.Lock()
        self._items: list[Any] = []
        self._begin()

    @property
    def is_holding_back(self) -> bool:
        """Whether it may hold back items that could be asked about."""
        return self._enough > self._least

    def consume(self, items: Iterable[Any]) -> bool:
        """Take all items of the source; return whether all were wanted.

        What came before an error of the source is given before that is raised.
        """
        giving = False
        try:
            for item in items:
                giving = True
                if not self.add(item):
                    return False
                giving = False
            giving = True
            return self.finish()
        except Exception:
            if not giving:
                self.finish()
            raise

    def add(self, item: Any) -> bool:
        """Take an item of the source; return whether more are wanted."""
        with self._lock:
            self._items.append(item)
            held = len(self._items)
            late = held >= self._least and time.monotonic() - self._began > ACCUMULATE_S
            if held < self._enough and not late:
                return True
            return self._emit_pieces()

    def finish(self) -> bool:
        """Give what is left; return whether more would be wanted."""
        with self._lock:
            return self._emit_pieces() and (not self._items or self._emit_piece(len(self._items)))

    def flush(self) -> None:
        """Give what is held back, unless another thread gives just now. Raises what `emit` does."""
        if self._lock.acquire(blocking=False):
            try:
                self._emit_pieces()
            finally:
                self._lock.release()

    def _begin(self) -> None:
        self._enough, self._began = largest_piece(self._most(), self._least), time.monotonic()

    def _emit_pieces(self) -> bool:
        while size := largest_piece(len(self._items), self._least):
            if not self._emit_piece(size):
                return False
        self._begin()
        return True

    def _emit_piece(self, size: int) -> bool:
        piece, self._items = self._items[:size], self._items[size:]
        return self._emit(piece)


def largest_piece(count: int, least: int) -> int:
    """Return the largest number up to `count` that is `least` times a power of two; 0 if there is none."""
    return least << ((count // least).bit_length() - 1) if count >= least else 0


# Batches, and the requests that they are cut into

MAX_FAILURES = 5
MIN_FAILING_S = 10.0
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
    - `cached_answers`: what the cache has of each pool's answers; empty without a cache.
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
        "cached_answers",
        "dropped",
        "failure",
        "items",
        "missing",
        "name",
        "payload",
        "plans",
        "samples",
        "turn",
        "weight",
    )

    def __init__(
        self,
        payload: Any,
        plans: Sequence[RequestPlan],
        *,
        items: Sequence[int],
        requests: Sequence[int],
        cached_answers: Sequence[CachedAnswers] = (),
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
        self.cached_answers = cached_answers
        self.answered_by: list[str] = []  # an address for each answer, in no order
        self.awaited = False
        self.dropped = False
        self.failure: BaseException | None = None
        self.turn: tuple[int, ...] = ()
        self.anew: Callable[[], Iterable[tuple[Batch, Sequence[Sequence[Request]]]]] | None = None

    @property
    def cached(self) -> int:
        """About how many samples no teacher is asked."""
        return (
            self.samples - len(set().union(*(pool.missing for pool in self.cached_answers)))
            if self.cached_answers
            else 0
        )

    def awaits(self, pool: int) -> bool:
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
    - `cache_writer`: where its answers are to be kept, if anywhere.
    """

    __slots__ = ("batch", "cache_writer", "deaths", "failures", "hedged", "index", "inputs", "pool", "rows")

    def __init__(
        self,
        batch: Batch,
        pool: int,
        index: int,
        inputs: Mapping[str, Tensor],
        rows: int,
        *,
        cache_writer: CacheWriter | None = None,
    ) -> None:
        self.batch = batch
        self.pool = pool
        self.index = index
        self.inputs = inputs
        self.rows = rows
        self.cache_writer = cache_writer
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
        if failures is None or failures.by.total() < MAX_FAILURES or now - failures.since < MIN_FAILING_S:
            return False
        return len(failures.by) >= MAX_FAILURES or self.failed_by >= in_use


def requests_of(
    payload: Any,
    plans: Sequence[RequestPlan],
    items: Sequence[int],
    inputs: Mapping[InputBinding, Tensor],
    *,
    size: int | None,
    most_rows: int,
    cached_answers: Sequence[CachedAnswers] = (),
    name: str = "a batch",
) -> tuple[Batch, list[list[Request]]]:
    """Return a batch of `items` with so many rows, and its requests, for each plan: about rows without cached answers.

    A request has `size` rows, or by default as many as `most_rows` and `MAX_REQUEST_BYTES` allow.
    """
    rows = sum(items)
    wanted: list[Sequence[int]] = [pool.missing for pool in cached_answers] or [range(rows)] * len(plans)
    at_once = [size or _rows_a_request([inputs[binding] for binding in plan.inputs], rows, most_rows) for plan in plans]
    counts = [-(-len(asked) // rows_of_one) for asked, rows_of_one in zip(wanted, at_once, strict=True)]
    batch = Batch(payload, plans, items=items, requests=counts, cached_answers=cached_answers, name=name)
    requests: list[list[Request]] = []
    for pool, (plan, asked, rows_of_one) in enumerate(zip(plans, wanted, at_once, strict=True)):
        tensors = [(binding.name, inputs[binding]) for binding in plan.inputs]
        of_pool = []
        for index in range(counts[pool]):
            part = asked[index * rows_of_one : (index + 1) * rows_of_one]
            cache_writer = cached_answers[pool].cache_writer(part) if cached_answers else None
            picked = _select_rows(tensors, part)
            of_pool.append(Request(batch, pool, index, picked, len(part), cache_writer=cache_writer))
        requests.append(of_pool)
    return batch, requests


def _rows_a_request(tensors: Sequence[Tensor], rows: int, most_rows: int) -> int:
    """Return how many of the rows go into one request, so that none is much smaller than the others."""
    requests = max(-(-rows // most_rows), -(-_nbytes(tensors) // MAX_REQUEST_BYTES), 1)
    return max(1, -(-rows // requests))


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.nbytes if isinstance(one, np.ndarray) else sum(row.nbytes for row in one) for one in tensors)


def _select_rows(tensors: Sequence[tuple[str, Tensor]], rows: Sequence[int]) -> dict[str, Tensor]:
    """Return these rows of each; they are not copied if they are neighbours."""
    if isinstance(rows, range):
        neighbours = slice(rows.start, rows.stop)
        return {name: tensor[neighbours] for name, tensor in tensors}
    return {
        name: tensor[rows] if isinstance(tensor, np.ndarray) else [tensor[row] for row in rows]
        for name, tensor in tensors
    }


# The formats: how items are cut, and joined with their answers

Format = Literal["sample", "sample_list", "batch"]

CutItems = tuple[Sequence[Any], Mapping[InputBinding, Tensor], Sequence[int]]
"""All slots of the samples in a piece (in format "batch", of each item), those that are sent as the teachers take them,
and how many rows each item has."""


def cut(
    kind: Format,
    piece: Sequence[Any],
    plans: Sequence[RequestPlan],
    first: int,
    *,
    size: int | None = None,
    most_rows: int = DEFAULT_ROWS,
    recall: CacheLookup | None = None,
) -> tuple[Batch, list[list[Request]]]:
    """Return a piece and its requests, for each plan; its first item is the epoch's `first`-th.

    `size`, `most_rows`: see `requests_of`. Rows whose answers are known to `recall` are not asked about, where a piece
    has one item. Large rows and single batches are not copied, except to leave such rows out.
    Raises SampleError for what the teachers don't take, and also where several items don't fit together.
    """
    where = _where(kind, first)
    payload, inputs, items = _CUT_BY_FORMAT[kind](piece, plans, where)
    cached_answers: Sequence[CachedAnswers] = ()
    if recall is not None:
        cached_answers = recall.of(payload[0] if kind == "batch" else payload, inputs, sum(items), where)
    last = first + len(piece) - 1
    which = "samples" if kind == "sample" else "batches"
    name = f"batch {first}" if kind != "sample" and len(piece) == 1 else f"{which} {first} to {last}"
    return requests_of(
        payload, plans, items, inputs, size=size, most_rows=most_rows, cached_answers=cached_answers, name=name
    )


def join(kind: Format, batch: Batch, names: Sequence[str] = ()) -> Iterable[Any]:
    """Return the items to deliver for a batch whose requests are all answered.

    With `names` of the pools, all answers to an item stand in one last slot, by the pool's and the output's name.
    """
    parts: list[Sequence[Answers]] = [cast("list[Answers]", answers) for answers in batch.answers]
    if batch.cached_answers:
        parts = [
            cached_answers.completed(part) for cached_answers, part in zip(batch.cached_answers, parts, strict=True)
        ]
    if kind == "batch":
        return _joined_batches(names, batch, parts)
    rows = [
        [chain.from_iterable([part[wanted.name] for part in answers]) for wanted in plan.outputs]
        for plan, answers in zip(batch.plans, parts, strict=True)
    ]
    columns = [_named_rows(names, batch, rows)] if names else rows[0]
    samples = list(zip(*batch.payload, *columns, strict=True))
    return samples if kind == "sample" else [samples[rows] for rows in _spans(batch)]


def _spans(batch: Batch) -> list[slice]:
    """Return where the rows of each item stand."""
    return [slice(end - rows, end) for rows, end in zip(batch.items, accumulate(batch.items), strict=True)]


def _joined_batches(
    names: Sequence[str], batch: Batch, parts: Sequence[Sequence[Answers]]
) -> Iterator[tuple[Any, ...]]:
    pools = [
        {wanted.name: _joined([part[wanted.name] for part in answers], wanted) for wanted in plan.outputs}
        for plan, answers in zip(batch.plans, parts, strict=True)
    ]
    for slots, rows in zip(batch.payload, _spans(batch), strict=True):
        its = [{name: array[rows] for name, array in arrays.items()} for arrays in pools]
        yield (*slots, *([dict(zip(names, its, strict=True))] if names else its[0].values()))


def _named_rows(
    names: Sequence[str], batch: Batch, rows: Sequence[Sequence[Iterable[Array]]]
) -> Iterator[dict[str, dict[str, Array]]]:
    outputs = [[wanted.name for wanted in plan.outputs] for plan in batch.plans]
    for sample in zip(*(zip(*columns, strict=True) for columns in rows), strict=True):
        yield {
            name: dict(zip(wanted, values, strict=True))
            for name, wanted, values in zip(names, outputs, sample, strict=True)
        }


def _joined(parts: Sequence[Array], wanted: OutputBinding) -> Array:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else wanted.empty()


def _where(kind: Format, first: int) -> SampleName:
    if kind == "batch":
        return lambda _: f"batch {first}"
    if kind == "sample":
        return lambda number: f"sample {first + number}"
    return lambda number: f"sample {number} of batch {first}"


def _batches(items: Sequence[Any], plans: Sequence[RequestPlan], where: SampleName) -> CutItems:
    slots, inputs, rows = zip(*[_batch(item, plans, where) for item in items], strict=True)
    if len(items) == 1:
        return slots, inputs[0], rows
    joined = {}
    for binding in inputs[0]:
        try:
            joined[binding] = np.concatenate([one[binding] for one in inputs])
        except ValueError as error:
            given = f"batches of several shapes ({error})"
            raise SampleError(binding.name, where(0), given, "batches of one") from None
    return slots, joined, rows


def _batch(
    item: Any, plans: Sequence[RequestPlan], where: SampleName
) -> tuple[SlotArrays, dict[InputBinding, Array], int]:
    slots = _slots(item, plans[0], where, 0)
    bindings = _input_bindings(plans)
    first = bindings[0]
    rows = len(slots[first.slot]) if slots[first.slot].ndim else 0
    inputs: dict[InputBinding, Array] = {}
    for binding in bindings:
        array = slots[binding.slot]
        if not array.ndim or len(array) != rows:
            given = f"{len(array)} rows" if array.ndim else "a single value"
            raise SampleError(binding.name, where(0), given, f"an array of rows, as many as {first.name!r} has")
        inputs[binding] = np.ascontiguousarray(binding.array(array, where(0)))
    return slots, inputs, rows


def _lists(items: Sequence[Any], plans: Sequence[RequestPlan], where: SampleName) -> CutItems:
    for item in items:
        if not isinstance(item, list | tuple):
            raise SampleError("item", where(0).removeprefix("sample 0 of "), type(item).__name__, "a list of samples")
    columns, inputs, _ = _samples(items[0] if len(items) == 1 else [*chain.from_iterable(items)], plans, where)
    return columns, inputs, [len(item) for item in items]


def _samples(items: Sequence[Any], plans: Sequence[RequestPlan], where: SampleName) -> CutItems:
    columns = _columns(items, plans[0], where)
    return (
        columns,
        {binding: binding.rows(columns[binding.slot], where) for binding in _input_bindings(plans)},
        [len(items)],
    )


_CUT_BY_FORMAT: dict[Format, Callable[[Sequence[Any], Sequence[RequestPlan], SampleName], CutItems]] = {
    "sample": _samples,
    "sample_list": _lists,
    "batch": _batches,
}


def _input_bindings(plans: Sequence[RequestPlan]) -> list[InputBinding]:
    """Return what is sent, once if several pools take the same."""
    return list(dict.fromkeys(binding for plan in plans for binding in plan.inputs))


def _slots(item: Any, plan: RequestPlan, where: SampleName, number: int) -> SlotArrays:
    """Return the slots of an item as arrays."""
    if not isinstance(item, list | tuple):
        raise SampleError("item", where(number), type(item).__name__, f"a tuple of {plan.slots_text}")
    if len(item) != len(plan.slots):
        raise SampleError("item", where(number), f"{len(item)} slots", plan.slots_text)
    return tuple([_array(slot, where, number) for slot in item])


def _columns(items: Sequence[Any], plan: RequestPlan, where: SampleName) -> list[SlotArrays]:
    """Return the slots of all samples as arrays, slot by slot. Checking whole columns costs less than each sample."""
    if not set(map(type, items)) <= {tuple, list} or set(map(len, items)) != {len(plan.slots)}:
        items = [_slots(item, plan, where, number) for number, item in enumerate(items)]
    columns = list(zip(*items, strict=True)) or [()] * len(plan.slots)
    return [column if set(map(type, column)) <= {np.ndarray} else _arrays(column, where) for column in columns]


def _arrays(column: Sequence[Any], where: SampleName) -> SlotArrays:
    try:
        return tuple(map(np.asarray, column))
    except ValueError:  # of one of them
        return tuple([_array(slot, where, number) for number, slot in enumerate(column)])


def _array(slot: Any, where: SampleName, number: int) -> Array:
    """Return `slot` as it is, or as an array of numpy's choice if it is a list or a number of Python's."""
    if type(slot) is np.ndarray:
        return slot
    try:
        return np.asarray(slot)
    except ValueError as error:
        raise SampleError("item", where(number), f"a slot that is no array ({error})", "arrays") from error
