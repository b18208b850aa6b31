"""How busy a teacher says that it is."""

from __future__ import annotations

import pytest

from edl_runtime.teacher.load import Load


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_teacher_is_busy_while_a_request_runs_or_waits() -> None:
    """Of two devices, one with two requests at a time for five of ten seconds is a quarter, and it fades."""
    clock = Clock()
    load = Load(2, clock)
    assert (load.report().busy, load.report().over_s) == (0, 0)
    load.begin(0)
    clock.now = 1.0
    load.begin(0)
    load.end(0)
    clock.now = 5.0
    assert load.report().busy == pytest.approx(0.5)
    load.end(0)
    clock.now = 10.0
    report = load.report()
    assert (report.busy, report.over_s) == (pytest.approx(0.25), 10)
    for second in range(11, 21):
        clock.now = float(second)
        report = load.report()
    assert (report.busy, report.over_s) == (pytest.approx(0.0), 10)


def test_what_was_before_it_joined_is_not_in_it() -> None:
    """A model that took a minute to load has not been idle for that minute."""
    clock = Clock()
    load = Load(1, clock)
    clock.now = 60.0
    load.report()
    load.begin(0)
    clock.now = 61.0
    report = load.report()
    assert (report.busy, report.over_s) == (pytest.approx(1.0), 1)
