"""What a student reports to a pool."""

from __future__ import annotations

import pytest

from edl_runtime.distill.discovery import DemandMeter, PoolCounts


class Reading:
    """Counts of a reader that waits for a quarter of its time and keeps one and a half teachers busy."""

    def __init__(self) -> None:
        self.now = 100.0
        self.connected = frozenset({"a:1"})
        self.waiting, self.asking, self.batches_per_s = 0.25, 1.5, 10.0
        self._waited_s, self._asked_s, self._batches = 40.0, 50.0, 1000.0

    def clock(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        self._waited_s += self.waiting * seconds
        self._asked_s += self.asking * seconds
        self._batches += self.batches_per_s * seconds

    def stop(self) -> None:
        """Take nothing any more, and wait for nothing."""
        self.waiting = self.asking = self.batches_per_s = 0.0

    def counts(self) -> PoolCounts:
        return PoolCounts(
            connected=self.connected,
            in_flight=2,
            queued=3,
            waited_s=self._waited_s,
            asked_s=self._asked_s,
            batches=round(self._batches),
            samples=round(8 * self._batches),
        )


@pytest.fixture
def reading() -> Reading:
    return Reading()


@pytest.fixture
def needs(reading: Reading) -> DemandMeter:
    return DemandMeter(reading.counts, 4, reading.clock)


def read(reading: Reading, needs: DemandMeter) -> None:
    """Have it work for a quarter of a minute."""
    for _ in range(15):
        reading.pass_s(1)
        assert not needs.report({}).pauses


def test_a_report_has_the_rates_of_the_last_seconds(reading: Reading, needs: DemandMeter) -> None:
    """What was before the first report is not in it, nor what is longer ago than ten seconds."""
    first = needs.report({})
    assert (first.waiting, first.over_s, first.teachers, first.want) == (0, 0, 1, 4)
    for _ in range(15):
        reading.pass_s(1)
        report = needs.report({})
    assert report.waiting == pytest.approx(0.25)
    assert report.asked == pytest.approx(1.5)
    assert report.samples_per_s == pytest.approx(80)
    assert (report.in_flight, report.queued, report.over_s) == (2, 3, 10)


def test_other_teachers_are_a_new_beginning(reading: Reading, needs: DemandMeter) -> None:
    """How long it waited for one teacher tells nothing about two."""
    read(reading, needs)
    reading.connected = frozenset({"a:1", "b:2"})
    reading.waiting = 0.0
    assert needs.report({}).over_s == 0
    reading.pass_s(2)
    report = needs.report({})
    assert (report.waiting, report.over_s, report.teachers) == (0, 2, 2)


def test_a_pause_is_reported_for_a_minute(reading: Reading, needs: DemandMeter) -> None:
    """It begins when nothing is taken for the time of some batches and two seconds; then nobody is there to read."""
    read(reading, needs)
    reading.stop()
    told = []
    for _ in range(70):
        reading.pass_s(1)
        told.append(needs.report({}).pauses)
    assert told == [False] * 2 + [True] * 57 + [False] * 11


def test_after_a_pause_begins_another_window(reading: Reading, needs: DemandMeter) -> None:
    """That nothing was asked in between tells nothing; other teachers meanwhile do not end the pause."""
    read(reading, needs)
    reading.stop()
    reading.pass_s(5)
    needs.report({})
    reading.connected = frozenset({"b:2"})
    assert needs.report({}).pauses
    reading.waiting, reading.asking, reading.batches_per_s = 0.25, 1.5, 10.0
    for _ in range(4):
        reading.pass_s(1)
        report = needs.report({})
    assert (report.pauses, report.over_s, report.asked) == (False, 3, pytest.approx(1.5))


def test_long_steps_are_no_pause(reading: Reading, needs: DemandMeter) -> None:
    """A student that takes a batch every five seconds is at work."""
    reading.waiting = 0.0
    for _ in range(10):
        reading.batches_per_s = 1.0
        reading.pass_s(1)
        needs.report({})
        reading.batches_per_s = 0.0
        for _ in range(4):
            reading.pass_s(1)
            assert not needs.report({}).pauses
