"""What a job's log says while it trains: how fast it is, and who is the limit."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from structlog.dev import ConsoleRenderer
from structlog.processors import JSONRenderer
from structlog.testing import capture_logs
from support.students.fake_readers import batches, reader_of
from support.teachers.fakes import arithmetic
from support.teachers.process import wait_until

from edl_runtime.distill import JobReporter, ReaderStats
from edl_runtime.distill.bottleneck import (
    GAP_S,
    SETTLED_S,
    UNANSWERED_S,
    Bottleneck,
    BottleneckFilter,
    ProgressRates,
    current_bottleneck,
)
from edl_runtime.progress import is_progress_line
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second is a hundredth of one."""
    monkeypatch.setattr("edl_runtime.distill.reporter.PUBLISH_EVERY_S", 0.01)
    monkeypatch.setattr("edl_runtime.distill.reporter.LOG_EVERY_S", 0.05)
    monkeypatch.setattr("edl_runtime.distill.bottleneck.SETTLED_S", 0.1)


class _Two:
    """Two batches, as a source that can be looked for."""

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        return islice(batches(), 2)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    ("waiting", "busy", "verdict"),
    [
        (0.5, 1, "the teachers are the limit: the student waits"),
        (0.0, 0, "the student is the limit: teachers are idle"),
    ],
)
def test_the_bottleneck_is_logged_once(waiting: float, busy: int, verdict: str) -> None:
    """Beside the lines of progress, which have the numbers. A task's log knows both again, and leaves them out."""
    begin = time.monotonic()

    def stats() -> ReaderStats:
        now = time.monotonic() - begin
        return ReaderStats(
            batches=int(1e4 * now), samples=int(1e5 * now), teachers=1, busy=busy, waited_s=waiting * now
        )

    def of(kind: str, field: str) -> list[str]:
        return [event[field] for event in logged.copy() if event["event"] == kind]

    with capture_logs() as logged, JobReporter(settings=RuntimeSettings(job="student")) as reporter:
        reporter.follow(stats)
        wait_until(lambda: bool(of("job.limit", "verdict")))
        lines = len(of("job.progress", "progress"))
        wait_until(lambda: len(of("job.progress", "progress")) > lines + 1)
    assert all("samples/s" in line for line in of("job.progress", "progress"))
    [said] = of("job.limit", "verdict")
    assert said.startswith(verdict)
    for render in (ConsoleRenderer(), JSONRenderer()):
        assert all(is_progress_line(str(render(None, "info", dict(event))), "student") for event in logged)


def test_a_reason_for_quarantine_is_one_short_line() -> None:
    """Why it is in quarantine may be what it says itself, and that can be anything."""
    with JobReporter(settings=RuntimeSettings()) as reporter:
        reporter.follow(lambda: ReaderStats(quarantined={"a:1": "no\n" * 1000}))
        [reason] = reporter.progress().quarantined.values()
    assert reason.startswith("no no no")
    assert len(reason) == 200


def test_a_closed_reader_is_counted_and_not_kept() -> None:
    """One reporter may serve a reader for each epoch: their sources are freed, and steps add up."""
    with JobReporter(settings=RuntimeSettings()) as reporter:
        sources = []
        for _ in range(3):
            source = _Two()
            sources.append(weakref.ref(source))
            with reader_of({"a:1": arithmetic}, source, reporter=reporter) as reader:
                assert len(list(reader)) == 2
            del source, reader

        def freed() -> bool:
            gc.collect()
            return [source() for source in sources] == [None] * 3

        wait_until(freed)  # on a busy machine a closed reader's threads may take a while to end
        assert reporter.stats().batches == 6
        assert reporter.stats().teachers == 0


NUMBERS: list[tuple[Bottleneck, dict[str, Any]]] = [
    ("teachers", {"waiting": 0.38, "busy": 1.0}),
    ("teachers", {"waiting": 0.38, "waiting_for_source": 0.1, "busy": 1.0}),
    ("teachers", {"waiting": 1.0, "busy": 1.0}),
    ("teachers", {"waiting": 0.38, "busy": 0.8}),
    ("answers", {"waiting": 0.38, "busy": 0.5}),
    ("source", {"waiting": 0.38, "waiting_for_source": 0.3}),
    ("source", {"waiting": 1.0, "waiting_for_source": 1.0, "trains": False}),
    ("student", {"waiting": 0.0, "busy": 0.2}),
    ("student", {"waiting": 0.01, "waiting_for_source": 0.01, "busy": 0.2}),
    ("student", {"waiting": 0.02, "busy": 0.75}),
    ("balanced", {"waiting": 0.0, "busy": 0.8}),
    ("balanced", {"waiting": 0.05, "busy": 0.2}),
    ("balanced", {"waiting": 0.05, "waiting_for_source": 0.05, "busy": 0.2}),
    ("no_answer", {"waiting": 1.0, "trains": False}),
    ("", {"waiting": 0.5, "trains": False}),
    ("", {"waiting": 0.0, "trains": False}),
]


@pytest.mark.parametrize(("limit", "numbers"), NUMBERS)
def test_the_bottleneck_follows_from_the_counts(limit: Bottleneck, numbers: dict[str, Any]) -> None:
    """Whoever would have to be faster for the training to be."""
    given = {"trains": True, "waiting_for_source": 0.0, "busy": 0.0, **numbers}
    assert current_bottleneck(**given) == limit


def _seconds(seen: Bottleneck, count: float, at: Iterator[int], settling: BottleneckFilter) -> list[Bottleneck]:
    return [settling.update(seen, float(next(at))) for _ in range(round(count))]


def test_a_limit_counts_once_it_has_held() -> None:
    """One stall, whose traces stay for a window, is no news, and neither is a long step."""
    settling, at = BottleneckFilter(), iter(range(10**6))
    assert _seconds("teachers", SETTLED_S, at, settling) == [""] * round(SETTLED_S)
    assert _seconds("teachers", 1, at, settling) == ["teachers"]
    assert set(_seconds("student", SETTLED_S, at, settling)) == {"teachers"}
    assert set(_seconds("teachers", 1, at, settling)) == {"teachers"}
    assert set(_seconds("", GAP_S - 1, at, settling)) == {"teachers"}
    assert set(_seconds("teachers", 1, at, settling)) == {"teachers"}
    assert _seconds("", GAP_S + SETTLED_S, at, settling)[-1] == ""


def test_a_limit_that_toggles_is_never_settled() -> None:
    """Numbers around a threshold say nothing, rather than one thing and then the other."""
    settling, at = BottleneckFilter(), iter(range(10**6))
    for _ in range(20):
        assert set(_seconds("balanced", 5, at, settling) + _seconds("teachers", 5, at, settling)) == {""}


def test_no_answer_is_reported_sooner_and_not_kept() -> None:
    """When one does, that is seen at the next look."""
    settling, at = BottleneckFilter(), iter(range(10**6))
    assert _seconds("no_answer", UNANSWERED_S + 1, at, settling)[-1] == "no_answer"
    assert _seconds("teachers", 1, at, settling) == [""]
    assert _seconds("no_answer", UNANSWERED_S + 1, at, settling)[-1] == "no_answer"
    assert _seconds("", 1, at, settling) == [""]


def test_shares_and_rates_are_those_of_the_last_seconds() -> None:
    """A teacher that comes late and does most of the work is seen to, and one that is gone is not."""
    pace, answered = ProgressRates(100.0), {"early": 0, "both": 0}
    for second in range(1, 31):
        answered["both"] += 1
        if second <= 15:
            answered["early"] += 9
        else:
            answered["late"] = answered.get("late", 0) + 3
        reading = ReaderStats(
            batches=second, teachers=2, busy=1, answered=dict(answered), waited_s=second / 2, waited_for_source_s=0
        )
        rates = pace.update(steps=2 * second, samples=32 * second, reading=reading, now=100.0 + second)
        if second == 15:
            assert rates.shares == pytest.approx({"early": 0.9, "both": 0.1})
    assert rates.shares == pytest.approx({"late": 0.75, "both": 0.25})
    assert (rates.steps_per_s, rates.samples_per_s) == pytest.approx((2, 32))
    assert (rates.waiting, rates.busy) == pytest.approx((0.5, 0.5))
    assert rates.limit == "answers"


def test_a_phase_without_a_reader_has_no_limit() -> None:
    """Steps that no teacher has a part in say nothing of teachers."""
    pace = ProgressRates(0.0)
    rates = [pace.update(steps=s, samples=s, reading=ReaderStats(), now=float(s)) for s in range(1, 120)]
    assert {each.limit for each in rates} == {""}
    assert rates[-1].steps_per_s == pytest.approx(1)
