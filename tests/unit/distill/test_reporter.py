"""What a job's log says while it trains."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.students.fake_readers import batches, reader_of
from support.teachers.fakes import arithmetic

from edl_runtime.distill import JobReporter, ReaderStats
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second is a twentieth of one."""
    monkeypatch.setattr("edl_runtime.distill.reporter.PUBLISH_EVERY_S", 0.05)
    monkeypatch.setattr("edl_runtime.distill.reporter.LOG_EVERY_S", 0.2)
    monkeypatch.setattr("edl_runtime.distill.limit.SETTLED_S", 0.3)
    monkeypatch.setattr("edl_runtime.distill.limit.LITTLE", 0.3)  # on a busy machine everybody waits a little
    monkeypatch.setattr("edl_runtime.distill.limit.MUCH", 0.5)


class _Two:
    """Two batches, as a source that can be looked for."""

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        return islice(batches(), 2)


def _in_turn(x: Array) -> dict[str, Array]:
    time.sleep(0.01)
    return arithmetic(x)


def _many() -> Iterator[tuple[Array, Array]]:
    for _ in range(3):
        yield from batches()


def _read(teachers: dict[str, Any], step_s: float) -> list[Any]:
    with (
        capture_logs() as logged,
        JobReporter(settings=RuntimeSettings(job="job")) as reporter,
        reader_of(teachers, _many, reporter=reporter) as reader,
    ):
        for _ in reader:
            time.sleep(step_s)
    return logged


@pytest.mark.parametrize(
    ("teachers", "step_s", "verdict"),
    [
        ({"a:1": _in_turn}, 0.0, "the teachers are the limit: the student waits"),
        ({"a:1": arithmetic, "b:2": arithmetic}, 0.01, "the student is the limit: teachers are idle"),
    ],
)
def test_the_log_says_once_who_is_the_limit(teachers: dict[str, Any], step_s: float, verdict: str) -> None:
    """Beside the lines of progress, which have the numbers."""
    logged = _read(teachers, step_s)
    lines = [event["progress"] for event in logged if event["event"] == "job.progress"]
    assert len(lines) >= 2
    assert all("samples/s" in line for line in lines)
    [said] = [event["verdict"] for event in logged if event["event"] == "job.limit"]
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
