"""Readers of fake teachers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import Any

import numpy as np
import pytest
from support.teachers.fakes import SIGNATURE, Behaviour, FakeTeachers, arithmetic

from edl_runtime.distill import AnswerCache, DistillReader, Fixed, dispatch_policy
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings

BATCHES = 30
ROWS = 10


def batches() -> Iterator[tuple[Array, Array]]:
    """Yield numbered batches: every value of the n-th is n."""
    for number in range(BATCHES):
        yield np.full((ROWS, 4), number, np.float32), np.arange(ROWS)


def reader_of(
    behaviours: dict[str, Behaviour] | FakeTeachers,
    source: Any = batches,
    *,
    wait_s: float = 30.0,
    **options: Any,
) -> DistillReader:
    teachers = behaviours if isinstance(behaviours, FakeTeachers) else FakeTeachers(behaviours)
    addresses = options.pop("addresses", tuple(teachers.behaviours) or ("a:1",))
    settings = options.pop("settings", RuntimeSettings(teacher_wait_s=wait_s))
    usual = {"inputs": ["x", "label"], "outputs": ["double"], "teachers": Fixed(addresses), "teacher_batch_size": 4}
    return DistillReader(source, **{**usual, **options}, settings=settings, connect=teachers.connect)


def numbers(epoch: list[Any]) -> list[int]:
    """Return the batches' numbers; check their answers."""
    for x, _, double in epoch:
        np.testing.assert_array_equal(double, x * 2)
    return [int(x[0, 0]) for x, *_ in epoch]


def patiently(x: Array) -> dict[str, Array]:
    time.sleep(0.002)
    return arithmetic(x)


def failing(error: Callable[[], BaseException], *, after: int = 0, times: int = 10**6) -> Behaviour:
    """Return a behaviour that raises for `times` requests after the first `after`."""
    seen = count()

    def behaviour(x: Array) -> dict[str, Array]:
        if after <= next(seen) < after + times:
            raise error()
        return patiently(x)

    return behaviour


def never_hedge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no request be hedged, however busy the machine is."""
    monkeypatch.setattr(dispatch_policy, "FIRST_HEDGE_DELAY_S", 600.0)
    monkeypatch.setattr(dispatch_policy, "MIN_HEDGE_DELAY_S", 600.0)


SAMPLES = 100
X = np.arange(SAMPLES * 4, dtype=np.float32).reshape(SAMPLES, 4)


class Source:
    """Samples of X in the order of `order`, which may be changed between epochs, ten in a batch."""

    def __init__(self, kind: str = "batch", name: Callable[[int], Any] = int) -> None:
        self.kind = kind
        self.name = name
        self.x = X
        self.order = list(range(SAMPLES))

    def __call__(self) -> Iterator[Any]:
        for start in range(0, len(self.order), 10):
            numbers = self.order[start : start + 10]
            names = [self.name(number) for number in numbers]
            samples = [(self.x[number], name) for number, name in zip(numbers, names, strict=True)]
            if self.kind == "sample":
                yield from samples
            else:
                yield samples if self.kind == "sample_list" else (self.x[numbers], names)

    def samples(self, epoch: list[Any]) -> list[Any]:
        """The samples of an epoch's items."""
        if self.kind == "sample":
            return epoch
        return list(chain.from_iterable(epoch if self.kind == "sample_list" else [zip(*item) for item in epoch]))  # noqa: B905

    def check(self, epoch: list[Any]) -> None:
        """Check that an epoch has every sample once, in order, with its own answers."""
        x, _, double, total = zip(*self.samples(epoch), strict=True)
        np.testing.assert_array_equal(x, X[self.order])
        np.testing.assert_array_equal(double, X[self.order] * 2)
        np.testing.assert_array_equal(total, X[self.order].sum(axis=1))


def caching_reader_of(
    fakes: FakeTeachers, source: Source, cache: AnswerCache | None, /, **options: Any
) -> DistillReader:
    usual = {"inputs": ["x", "id"], "outputs": ["double", "sum"], "format": source.kind}
    return reader_of(fakes, source, cache=cache, **{**usual, **options})


def teachers_with(signature: ModelSignature = SIGNATURE, behaviour: Behaviour = arithmetic) -> FakeTeachers:
    return FakeTeachers({"a:1": behaviour, "b:2": behaviour}, {"a:1": signature, "b:2": signature})
