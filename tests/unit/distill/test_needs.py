"""What a student reports to a pool."""

from __future__ import annotations

import pytest

from edl_runtime.distill.needs import Needs, PoolCounts


class Reading:
    """Counts of a reader that waits for a quarter of its time and keeps one and a half teachers busy."""

    def __init__(self) -> None:
        self.now = 100.0
        self.connected = frozenset({"a:1"})
        self.waiting, self.asking = 0.25, 1.5
        self._waited_s, self._asked_s = 40.0, 50.0

    def clock(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        self._waited_s += self.waiting * seconds
        self._asked_s += self.asking * seconds

    def counts(self) -> PoolCounts:
        return PoolCounts(
            connected=self.connected,
            in_flight=2,
            queued=3,
            waited_s=self._waited_s,
            asked_s=self._asked_s,
            samples=round(80 * self.now),
        )


def test_a_report_has_the_rates_of_the_last_seconds() -> None:
    """What was before the first report is not in it, nor what is longer ago than ten seconds."""
    reading = Reading()
    needs = Needs(reading.counts, 4, reading.clock)
    first = needs.report()
    assert (first.waiting, first.over_s, first.teachers, first.want) == (0, 0, 1, 4)
    for _ in range(15):
        reading.pass_s(1)
        report = needs.report()
    assert report.waiting == pytest.approx(0.25)
    assert report.asked == pytest.approx(1.5)
    assert report.samples_per_s == pytest.approx(80)
    assert (report.in_flight, report.queued, report.over_s) == (2, 3, 10)


def test_other_teachers_are_a_new_beginning() -> None:
    """How long it waited for one teacher tells nothing about two."""
    reading = Reading()
    needs = Needs(reading.counts, None, reading.clock)
    for _ in range(15):
        reading.pass_s(1)
        needs.report()
    reading.connected = frozenset({"a:1", "b:2"})
    reading.waiting = 0.0
    assert needs.report().over_s == 0
    reading.pass_s(2)
    report = needs.report()
    assert (report.waiting, report.over_s, report.teachers) == (0, 2, 2)
