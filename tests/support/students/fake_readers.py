"""Readers of made-up teachers for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from support.teachers.fakes import Behaviour, FakeTeachers, arithmetic

from edl_runtime.distill import DistillReader, Fixed, hedging
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings

BATCHES = 30
ROWS = 10


def batches() -> Iterator[tuple[Array, Array]]:
    """Batches that can be told apart: every value of the n-th is n."""
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
    """The batches' numbers; their answers are checked on the way."""
    for x, _, double in epoch:
        np.testing.assert_array_equal(double, x * 2)
    return [int(x[0, 0]) for x, *_ in epoch]


def patiently(x: Array) -> dict[str, Array]:
    time.sleep(0.002)
    return arithmetic(x)


def failing(error: Callable[[], BaseException], *, after: int = 0, times: int = 10**6) -> Behaviour:
    """A behaviour that raises for so many requests after the first `after`."""
    seen = count()

    def behaviour(x: Array) -> dict[str, Array]:
        if after <= next(seen) < after + times:
            raise error()
        return patiently(x)

    return behaviour


def never_hedge(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, nothing is asked of a second teacher."""
    monkeypatch.setattr(hedging, "UNKNOWN_DELAY_S", 600.0)
    monkeypatch.setattr(hedging, "LEAST_DELAY_S", 600.0)
