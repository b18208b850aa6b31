"""Readers with a cache for tests: what they read, and whether it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from support.students import fake_readers
from support.teachers.fakes import SIGNATURE, Behaviour, FakeTeachers, arithmetic

from edl_runtime.distill import AnswerCache, DistillReader
from edl_runtime.protocol.oip import ModelSignature

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
        """Every sample once, in order, with its own answers."""
        x, _, double, total = zip(*self.samples(epoch), strict=True)
        np.testing.assert_array_equal(x, X[self.order])
        np.testing.assert_array_equal(double, X[self.order] * 2)
        np.testing.assert_array_equal(total, X[self.order].sum(axis=1))


def reader_of(fakes: FakeTeachers, source: Source, cache: AnswerCache | None, /, **options: Any) -> DistillReader:
    usual = {"inputs": ["x", "id"], "outputs": ["double", "sum"], "format": source.kind}
    return fake_readers.reader_of(fakes, source, cache=cache, **{**usual, **options})


def teachers_with(signature: ModelSignature = SIGNATURE, behaviour: Behaviour = arithmetic) -> FakeTeachers:
    return FakeTeachers({"a:1": behaviour, "b:2": behaviour}, {"a:1": signature, "b:2": signature})


def names(count: int) -> list[bytes]:
    """So many ids as a store has them."""
    return [b"i%d" % number for number in range(count)]
