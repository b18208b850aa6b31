"""The source's items: collected into pieces, cut into requests, and joined with the answers.

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
from dataclasses import KW_ONLY, InitVar, dataclass, field
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from edl_runtime.distill.bindings import Answers, InputBinding, OutputBinding, RequestPlan, SampleName, SlotArrays
from edl_runtime.distill.cache.lookup import CachedAnswers, CacheLookup
from edl_runtime.distill.dispatch_policy import DEFAULT_ROWS, MAX_REQUEST_BYTES
from edl_runtime.distill.errors import SampleError
from edl_runtime.protocol.tensors import Array, Tensor

ACCUMULATE_S = 0.002
"""More items than the least are collected only if the source yields them within this time."""


class ItemAccumulator:
    """Collects the items of one epoch into pieces to request together; safe from any thread.

    Pieces have `least` items times a power of two, up to `most()`, so that few batch sizes occur: a new one costs a
    teacher several runs. A script that waits calls `flush`, since the source may itself wait for the script.

    - `emit`: takes a piece; returns False when the epoch takes no more. Called for one piece at a time, in order.
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
        """Whether it may hold items that could be requested already."""
        return self._enough > self._least

    def consume(self, items: Iterable[Any]) -> bool:
        """Take all items of the source; return False if the epoch took no more.

        Items before an error of the source are emitted before that is raised.
        """
        emitting = False  # else an error is the source's
        try:
            for item in items:
                emitting = True
                if not self.add(item):
                    return False
                emitting = False
            emitting = True
            return self.finish()
        except Exception:
            if not emitting:
                self.finish()
            raise

    def add(self, item: Any) -> bool:
        """Take an item of the source; return False if the epoch takes no more."""
        with self._lock:
            self._items.append(item)
            held = len(self._items)
            late = held >= self._least and time.monotonic() - self._began > ACCUMULATE_S
            if held < self._enough and not late:
                return True
            return self._emit_pieces()

    def finish(self) -> bool:
        """Emit what is left; return False if the epoch takes no more."""
        with self._lock:
            return self._emit_pieces() and (not self._items or self._emit_piece(len(self._items)))

    def flush(self) -> None:
        """Emit what is held, unless another thread is emitting. Raises what `emit` raises."""
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
"""A request that failed so often and for so long is given up if all teachers in use have failed it. Until then the
teachers may be at fault: they may recover, or the student may get others."""


@dataclass(slots=True, eq=False, repr=False)
class Batch:
    """Items of the source that are requested together and delivered once all their requests are answered.

    `plans` has what is requested from each pool; `requests`, how many requests go to each. A batch holds no reference
    to its requests, which hold one to it: without a cycle, large arrays are freed at their last use, not by the
    garbage collector.

    - `items`: how many rows each item of the source has; in format "sample" all rows are one piece.
    - `cached_answers`: what the cache has of each pool's answers; empty without a cache.
    - `name`: names it in messages, by its position in the epoch.
    - `answers`: of each pool's requests, in order; None for those to come. `missing` counts these.
    - `answered_at`: when each pool answered last, in monotonic seconds; `answered_by`: an address for each answer.
    - `weight`: its share of the window: the number of its requests, at least 1.
    - `awaited`: the training script waits for this batch.
    - `dropped`: its epoch is over, so nobody will take it.
    - `failure`: raised in its place.
    - `turn`: its position among all batches; that of a part of a batch begins with the batch's own.
    - `split`: cuts its items into batches and requests of the usual size; None if it has that size.
    """

    payload: Any
    plans: Sequence[RequestPlan]
    _: KW_ONLY
    items: Sequence[int]
    requests: InitVar[Sequence[int]]
    cached_answers: Sequence[CachedAnswers] = ()
    name: str = "a batch"
    samples: int = field(init=False)
    missing: int = field(init=False)
    weight: int = field(init=False)
    answers: tuple[list[Answers | None], ...] = field(init=False)
    answered_at: list[float] = field(init=False)
    answered_by: list[str] = field(init=False, default_factory=list)
    awaited: bool = False
    dropped: bool = False
    failure: BaseException | None = None
    turn: tuple[int, ...] = ()
    split: Callable[[], Iterable[tuple[Batch, Sequence[Sequence[Request]]]]] | None = None

    def __post_init__(self, requests: Sequence[int]) -> None:
        self.samples = sum(self.items)
        self.missing = sum(requests)
        self.weight = self.missing or 1
        self.answers = tuple([None] * count for count in requests)
        self.answered_at = [0.0] * len(requests)

    @property
    def cached(self) -> int:
        if not self.cached_answers:
            return 0
        return self.samples - len(set().union(*(pool.missing for pool in self.cached_answers)))

    def awaits(self, pool: int) -> bool:
        """Whether a request to this pool has no answer yet."""
        return None in self.answers[pool]


class Failures(NamedTuple):
    """How often each teacher failed a request, by address, and when the first one did, in monotonic seconds."""

    since: float
    by: Counter[str]


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """`rows` rows of `inputs` for one teacher of the `pool`-th pool: the `index`-th part of `batch`.

    - `cache_writer`: stores its answers, if there is a cache.
    - `hedged`: it was or will be sent to a second teacher too; no third one gets it for that reason.
    - `deaths`: the teachers whose predictors died under it.
    """

    batch: Batch
    pool: int
    index: int
    inputs: Mapping[str, Tensor]
    rows: int
    cache_writer: Callable[[Answers], None] | None = None
    hedged: bool = False
    deaths: tuple[str, ...] = ()
    failures: Failures | None = None

    @property
    def name(self) -> str:
        """Its name in messages."""
        parts = len(self.batch.answers[self.pool])
        return f"part {self.index + 1} of {parts} of {self.batch.name}" if parts > 1 else self.batch.name

    @property
    def turn(self) -> tuple[tuple[int, ...], int]:
        """Its position among the requests to the pool, in the order of the source."""
        return self.batch.turn, self.index

    @property
    def row_bytes(self) -> float:
        return _nbytes(self.inputs.values()) / self.rows

    @property
    def settled(self) -> bool:
        batch = self.batch
        return batch.dropped or batch.failure is not None or batch.answers[self.pool][self.index] is not None

    def answer(self, address: str, answers: Answers, now: float) -> None:
        """Store the answers of a teacher; call it for the first ones only."""
        self.batch.answers[self.pool][self.index] = answers
        self.batch.answered_at[self.pool] = now
        self.batch.answered_by.append(address)
        self.batch.missing -= 1

    def fail(self, address: str, now: float) -> None:
        if self.failures is None:
            self.failures = Failures(now, Counter())
        self.failures.by[address] += 1

    @property
    def failed_by(self) -> AbstractSet[str]:
        return self.failures.by.keys() if self.failures is not None else frozenset()

    def is_hopeless(self, in_use: AbstractSet[str], now: float) -> bool:
        """Whether the request is at fault, not the teachers: all of them fail it, repeatedly."""
        failures = self.failures
        if failures is None or failures.by.total() < MAX_FAILURES or now - failures.since < MIN_FAILING_S:
            return False
        return len(failures.by) >= MAX_FAILURES or self.failed_by >= in_use


def _rows_a_request(tensors: Sequence[Tensor], rows: int, most_rows: int) -> int:
    """Return the rows of one request, such that no request is much smaller than the others."""
    requests = max(-(-rows // most_rows), -(-_nbytes(tensors) // MAX_REQUEST_BYTES), 1)
    return max(1, -(-rows // requests))


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.nbytes if isinstance(one, np.ndarray) else sum(row.nbytes for row in one) for one in tensors)


def _select_rows(tensors: Sequence[tuple[str, Tensor]], rows: Sequence[int]) -> dict[str, Tensor]:
    """Return these rows of each tensor; adjacent rows are not copied."""
    if isinstance(rows, range):
        adjacent = slice(rows.start, rows.stop)
        return {name: tensor[adjacent] for name, tensor in tensors}
    return {
        name: tensor[rows] if isinstance(tensor, np.ndarray) else [tensor[row] for row in rows]
        for name, tensor in tensors
    }


# The formats: how items are cut, and joined with their answers

Format = Literal["sample", "sample_list", "batch"]

CutItems = tuple[Sequence[Any], Mapping[InputBinding, Tensor], Sequence[int]]
"""All slots of the samples in a piece (in format "batch", of each item), the model inputs among them in the model's
shapes, and how many rows each item has."""


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
    """Return a piece as a batch and its requests, for each plan; its first item is the epoch's `first`-th.

    A request has `size` rows, or by default as many as `most_rows` and `MAX_REQUEST_BYTES` allow. Rows whose answers
    `recall` has are not requested, where a piece has one item. Large rows and single batches are not copied, except to
    leave such rows out. Raises SampleError for items that teachers don't take, and if several items can't be joined.
    """
    where = _where(kind, first)
    payload, inputs, items = _CUT_BY_FORMAT[kind](piece, plans, where)
    rows = sum(items)
    cached_answers: Sequence[CachedAnswers] = ()
    if recall is not None:
        cached_answers = recall.of(payload[0] if kind == "batch" else payload, inputs, rows, where)
    missing: list[Sequence[int]] = [pool.missing for pool in cached_answers] or [range(rows)] * len(plans)
    at_once = [size or _rows_a_request([inputs[binding] for binding in plan.inputs], rows, most_rows) for plan in plans]
    counts = [-(-len(rows_of_pool) // rows_of_one) for rows_of_pool, rows_of_one in zip(missing, at_once, strict=True)]
    which = "samples" if kind == "sample" else "batches"
    is_batch = kind != "sample" and len(piece) == 1
    name = f"batch {first}" if is_batch else f"{which} {first} to {first + len(piece) - 1}"
    batch = Batch(payload, plans, items=items, requests=counts, cached_answers=cached_answers, name=name)
    requests: list[list[Request]] = []
    for pool, (plan, rows_of_pool, rows_of_one) in enumerate(zip(plans, missing, at_once, strict=True)):
        tensors = [(binding.name, inputs[binding]) for binding in plan.inputs]
        of_pool = []
        for index in range(counts[pool]):
            part = rows_of_pool[index * rows_of_one : (index + 1) * rows_of_one]
            cache_writer = cached_answers[pool].cache_writer(part) if cached_answers else None
            picked = _select_rows(tensors, part)
            of_pool.append(Request(batch, pool, index, picked, len(part), cache_writer=cache_writer))
        requests.append(of_pool)
    return batch, requests


def join(kind: Format, batch: Batch, names: Sequence[str] = ()) -> Iterable[Any]:
    """Return the items to deliver for a batch whose requests are all answered.

    With `names` of the pools, the last slot of an item is a dict of all its answers, by pool and output.
    """
    parts: list[Sequence[Answers]] = [cast("list[Answers]", answers) for answers in batch.answers]
    if batch.cached_answers:
        parts = [
            cached_answers.completed(part) for cached_answers, part in zip(batch.cached_answers, parts, strict=True)
        ]
    if kind == "batch":
        return _joined_batches(names, batch, parts)
    rows = [
        [chain.from_iterable([part[output.name] for part in answers]) for output in plan.outputs]
        for plan, answers in zip(batch.plans, parts, strict=True)
    ]
    columns = [_named_rows(names, batch, rows)] if names else rows[0]
    samples = list(zip(*batch.payload, *columns, strict=True))
    return samples if kind == "sample" else [samples[rows] for rows in _spans(batch)]


def _spans(batch: Batch) -> list[slice]:
    return [slice(end - rows, end) for rows, end in zip(batch.items, accumulate(batch.items), strict=True)]


def _joined_batches(
    names: Sequence[str], batch: Batch, parts: Sequence[Sequence[Answers]]
) -> Iterator[tuple[Any, ...]]:
    pools = [
        {output.name: _joined([part[output.name] for part in answers], output) for output in plan.outputs}
        for plan, answers in zip(batch.plans, parts, strict=True)
    ]
    for slots, rows in zip(batch.payload, _spans(batch), strict=True):
        its = [{name: array[rows] for name, array in arrays.items()} for arrays in pools]
        yield (*slots, *([dict(zip(names, its, strict=True))] if names else its[0].values()))


def _named_rows(
    names: Sequence[str], batch: Batch, rows: Sequence[Sequence[Iterable[Array]]]
) -> Iterator[dict[str, dict[str, Array]]]:
    outputs = [[output.name for output in plan.outputs] for plan in batch.plans]
    for sample in zip(*(zip(*columns, strict=True) for columns in rows), strict=True):
        yield {
            name: dict(zip(its_outputs, values, strict=True))
            for name, its_outputs, values in zip(names, outputs, sample, strict=True)
        }


def _joined(parts: Sequence[Array], output: OutputBinding) -> Array:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else output.empty()


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
    """Return the inputs to send, once each if several pools take the same."""
    return list(dict.fromkeys(binding for plan in plans for binding in plan.inputs))


def _slots(item: Any, plan: RequestPlan, where: SampleName, number: int) -> SlotArrays:
    if not isinstance(item, list | tuple):
        raise SampleError("item", where(number), type(item).__name__, f"a tuple of {plan.slots_text}")
    if len(item) != len(plan.slots):
        raise SampleError("item", where(number), f"{len(item)} slots", plan.slots_text)
    return tuple([_array(slot, where, number) for slot in item])


def _columns(items: Sequence[Any], plan: RequestPlan, where: SampleName) -> list[SlotArrays]:
    """Return the slots of all samples as arrays, slot by slot. Checking whole columns is faster than each sample."""
    if not set(map(type, items)) <= {tuple, list} or set(map(len, items)) != {len(plan.slots)}:
        items = [_slots(item, plan, where, number) for number, item in enumerate(items)]
    columns = list(zip(*items, strict=True)) or [()] * len(plan.slots)
    return [column if set(map(type, column)) <= {np.ndarray} else _arrays(column, where) for column in columns]


def _arrays(column: Sequence[Any], where: SampleName) -> SlotArrays:
    try:
        return tuple(map(np.asarray, column))
    except ValueError:  # find the sample to name in the error
        return tuple([_array(slot, where, number) for number, slot in enumerate(column)])


def _array(slot: Any, where: SampleName, number: int) -> Array:
    """Return `slot` as it is if it is an array, else as one of numpy's choice of dtype."""
    if type(slot) is np.ndarray:
        return slot
    try:
        return np.asarray(slot)
    except ValueError as error:
        raise SampleError("item", where(number), f"a slot that is no array ({error})", "arrays") from error
