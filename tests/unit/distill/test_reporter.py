"""What a job's log says while it trains."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from itertools import islice

import pytest
from structlog.testing import capture_logs
from support.students.fake_readers import batches, reader_of
from support.teachers.fakes import arithmetic
from support.teachers.process import wait_until

from edl_runtime.distill import JobReporter, ReaderStats
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second is a hundredth of one."""
    monkeypatch.setattr("edl_runtime.distill.reporter.PUBLISH_EVERY_S", 0.01)
    monkeypatch.setattr("edl_runtime.distill.reporter.LOG_EVERY_S", 0.05)
    monkeypatch.setattr("edl_runtime.distill.limit.SETTLED_S", 0.1)


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
def test_the_log_says_once_who_is_the_limit(waiting: float, busy: int, verdict: str) -> None:
    """Beside the lines of progress, which have the numbers."""
    begin = time.monotonic()

    def stats() -> ReaderStats:
        now = time.monotonic() - begin
        return ReaderStats(
            batches=int(1e4 * now), samples=int(1e5 * now), teachers=1, busy=busy, waited_s=waiting * now
        )

    def of(kind: str, field: str) -> list[str]:
        return [event[field] for event in logged.copy() if event["event"] == kind]

    with capture_logs() as logged, JobReporter(settings=RuntimeSettings(job="job")) as reporter:
        reporter.follow(stats)
        wait_until(lambda: bool(of("job.limit", "verdict")))
        lines = len(of("job.progress", "progress"))
        wait_until(lambda: len(of("job.progress", "progress")) > lines + 1)
    assert all("samples/s" in line for line in of("job.progress", "progress"))
    [said] = of("job.limit", "verdict")
    assert said.startswith(verdict)


def test_a_teachers_words_are_cut_and_on_one_line() -> None:
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
        gc.collect()
        assert [source() for source in sources] == [None] * 3
        assert reporter.stats().batches == 6
        assert reporter.stats().teachers == 0
