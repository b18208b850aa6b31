"""The three shapes of a source's items: cut into requests, and put together again with the answers.

| format | the source yields | the reader yields |
| --- | --- | --- |
| sample | (image, label) | (image, label, *answers), one at a time |
| sample_list | [(image, label), …] | [(image, label, *answers), …], as long as the source's list |
| batch | (images[B, …], labels[B, …]) | (images, labels, *answers[B, …]) |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Literal, cast

import numpy as np

from edl_runtime.distill.batches import Batch, Request, requests_of
from edl_runtime.distill.feeds import Answer, Answers, Feed, Plan, Slots, Where
from edl_runtime.distill.recall import Recall, Recalled
from edl_runtime.distill.sizing import USUAL_ROWS
from edl_runtime.errors import SampleError
from edl_runtime.protocol.tensors import Array, Tensor

Format = Literal["sample", "sample_list", "batch"]

Cut = tuple[Sequence[Any], Mapping[Feed, Tensor], Sequence[int]]
"""All slots of the samples in a piece (in format "batch", of each item), those that are sent as the teachers take them,
and how many rows each item has."""


def cut(
    kind: Format,
    piece: Sequence[Any],
    plans: Sequence[Plan],
    first: int,
    *,
    size: int | None = None,
    most_rows: int = USUAL_ROWS,
    recall: Recall | None = None,
) -> tuple[Batch, list[list[Request]]]:
    """Return a piece and its requests, for each plan; its first item is the epoch's `first`-th.

    `size`, `most_rows`: see `requests_of`. Rows whose answers are known to `recall` are not asked about, where a piece
    has one item. Large rows and single batches are not copied, except to leave such rows out.
    Raises SampleError for what the teachers don't take, and also where several items don't fit together.
    """
    where = _where(kind, first)
    payload, inputs, items = _CUTS[kind](piece, plans, where)
    recalled: Sequence[Recalled] = ()
    if recall is not None:
        recalled = recall.of(payload[0] if kind == "batch" else payload, inputs, sum(items), where)
    last = first + len(piece) - 1
    which = "samples" if kind == "sample" else "batches"
    name = f"batch {first}" if kind != "sample" and len(piece) == 1 else f"{which} {first} to {last}"
    return requests_of(payload, plans, items, inputs, size=size, most_rows=most_rows, recalled=recalled, name=name)


def join(kind: Format, batch: Batch, names: Sequence[str] = ()) -> Iterable[Any]:
    """Return the items to deliver for a batch whose requests are all answered.

    With `names` of the pools, all answers to an item stand in one last slot, by the pool's and the output's name.
    """
    parts: list[Sequence[Answers]] = [cast("list[Answers]", answers) for answers in batch.answers]
    if batch.recalled:
        parts = [recalled.completed(part) for recalled, part in zip(batch.recalled, parts, strict=True)]
    if kind == "batch":
        return _joined_batches(names, batch, parts)
    rows = [
        [chain.from_iterable([part[wanted.name] for part in answers]) for wanted in plan.answers]
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
        {wanted.name: _joined([part[wanted.name] for part in answers], wanted) for wanted in plan.answers}
        for plan, answers in zip(batch.plans, parts, strict=True)
    ]
    for slots, rows in zip(batch.payload, _spans(batch), strict=True):
        its = [{name: array[rows] for name, array in arrays.items()} for arrays in pools]
        yield (*slots, *([dict(zip(names, its, strict=True))] if names else its[0].values()))


def _named_rows(
    names: Sequence[str], batch: Batch, rows: Sequence[Sequence[Iterable[Array]]]
) -> Iterator[dict[str, dict[str, Array]]]:
    outputs = [[wanted.name for wanted in plan.answers] for plan in batch.plans]
    for sample in zip(*(zip(*columns, strict=True) for columns in rows), strict=True):
        yield {
            name: dict(zip(wanted, values, strict=True))
            for name, wanted, values in zip(names, outputs, sample, strict=True)
        }


def _joined(parts: Sequence[Array], wanted: Answer) -> Array:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else wanted.none()


def _where(kind: Format, first: int) -> Where:
    if kind == "batch":
        return lambda _: f"batch {first}"
    if kind == "sample":
        return lambda number: f"sample {first + number}"
    return lambda number: f"sample {number} of batch {first}"


def _batches(items: Sequence[Any], plans: Sequence[Plan], where: Where) -> Cut:
    slots, inputs, rows = zip(*[_batch(item, plans, where) for item in items], strict=True)
    if len(items) == 1:
        return slots, inputs[0], rows
    joined = {}
    for feed in inputs[0]:
        try:
            joined[feed] = np.concatenate([one[feed] for one in inputs])
        except ValueError as error:
            raise SampleError(feed.name, where(0), f"batches of several shapes ({error})", "batches of one") from None
    return slots, joined, rows


def _batch(item: Any, plans: Sequence[Plan], where: Where) -> tuple[Slots, dict[Feed, Array], int]:
    slots = _slots(item, plans[0], where, 0)
    feeds = _feeds(plans)
    first = feeds[0]
    rows = len(slots[first.slot]) if slots[first.slot].ndim else 0
    inputs: dict[Feed, Array] = {}
    for feed in feeds:
        array = slots[feed.slot]
        if not array.ndim or len(array) != rows:
            given = f"{len(array)} rows" if array.ndim else "a single value"
            raise SampleError(feed.name, where(0), given, f"an array of rows, as many as {first.name!r} has")
        inputs[feed] = np.ascontiguousarray(feed.array(array, where(0)))
    return slots, inputs, rows


def _lists(items: Sequence[Any], plans: Sequence[Plan], where: Where) -> Cut:
    for item in items:
        if not isinstance(item, list | tuple):
            raise SampleError("item", where(0).removeprefix("sample 0 of "), type(item).__name__, "a list of samples")
    columns, inputs, _ = _samples(items[0] if len(items) == 1 else [*chain.from_iterable(items)], plans, where)
    return columns, inputs, [len(item) for item in items]


def _samples(items: Sequence[Any], plans: Sequence[Plan], where: Where) -> Cut:
    columns = _columns(items, plans[0], where)
    return columns, {feed: feed.rows(columns[feed.slot], where) for feed in _feeds(plans)}, [len(items)]


_CUTS: dict[Format, Callable[[Sequence[Any], Sequence[Plan], Where], Cut]] = {
    "sample": _samples,
    "sample_list": _lists,
    "batch": _batches,
}


def _feeds(plans: Sequence[Plan]) -> list[Feed]:
    """Return what is sent, once if several pools take the same."""
    return list(dict.fromkeys(feed for plan in plans for feed in plan.feeds))


def _slots(item: Any, plan: Plan, where: Where, number: int) -> Slots:
    """Return the slots of an item as arrays."""
    if not isinstance(item, list | tuple):
        raise SampleError("item", where(number), type(item).__name__, f"a tuple of {plan.slots_in_words}")
    if len(item) != len(plan.slots):
        raise SampleError("item", where(number), f"{len(item)} slots", plan.slots_in_words)
    return tuple([_array(slot, where, number) for slot in item])


def _columns(items: Sequence[Any], plan: Plan, where: Where) -> list[Slots]:
    """Return the slots of all samples as arrays, slot by slot. Checking whole columns costs less than each sample."""
    if not set(map(type, items)) <= {tuple, list} or set(map(len, items)) != {len(plan.slots)}:
        items = [_slots(item, plan, where, number) for number, item in enumerate(items)]
    columns = list(zip(*items, strict=True)) or [()] * len(plan.slots)
    return [column if set(map(type, column)) <= {np.ndarray} else _arrays(column, where) for column in columns]


def _arrays(column: Sequence[Any], where: Where) -> Slots:
    try:
        return tuple(map(np.asarray, column))
    except ValueError:  # of one of them
        return tuple([_array(slot, where, number) for number, slot in enumerate(column)])


def _array(slot: Any, where: Where, number: int) -> Array:
    """Return `slot` as it is, or as an array of numpy's choice if it is a list or a number of Python's."""
    if type(slot) is np.ndarray:
        return slot
    try:
        return np.asarray(slot)
    except ValueError as error:
        raise SampleError("item", where(number), f"a slot that is no array ({error})", "arrays") from error
