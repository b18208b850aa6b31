"""What Prometheus is shown of readers."""

from __future__ import annotations

import socket

import pytest
from prometheus_client import CollectorRegistry
from support.students.fake_readers import BATCHES, ROWS, reader_of
from support.teachers.fakes import arithmetic

from edl_runtime.distill.metrics import HOST, ReaderCollector, endpoint_at
from edl_runtime.distill.stats import ReaderStats


def _sample(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"edl_distill_{name}", labels)


def _registry(stats: ReaderStats) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(ReaderCollector(lambda: stats))
    return registry


def test_a_registry_of_ones_own_takes_a_readers_counts() -> None:
    """They are read when asked for, and stay when the reader is closed."""
    registry = CollectorRegistry(auto_describe=True)
    with reader_of({"a:1": arithmetic}) as reader:
        registry.register(ReaderCollector(reader.stats))
        assert _sample(registry, "samples_total") == 0
        list(reader)
        assert _sample(registry, "teachers") == 1
    assert _sample(registry, "batches_total") == BATCHES
    assert _sample(registry, "samples_total") == BATCHES * ROWS
    assert _sample(registry, "answers_total", teacher="a:1") == 3 * BATCHES
    assert _sample(registry, "teachers") == 0


def test_every_count_has_its_metric() -> None:
    """Waits by whom they are for; a teacher that is out of quarantine is shown as such."""
    registry = _registry(
        ReaderStats(
            batches=1,
            samples=2,
            cached=3,
            waited_s=5.0,
            waited_for_source_s=1.0,
            queued=6,
            in_flight=7,
            retries=8,
            hedges=9,
            teachers=10,
            answered={"a:1": 11},
            quarantined={"b:1": 'lies\n"always"'},
        )
    )
    unlabelled = {
        name: _sample(registry, name)
        for name in (
            *("batches_total", "samples_total", "cached_samples_total", "retries_total", "hedges_total"),
            *("queued_requests", "requests_in_flight", "teachers"),
        )
    }
    assert list(unlabelled.values()) == [1, 2, 3, 8, 9, 6, 7, 10]
    waits = [_sample(registry, "wait_seconds_total", **{"for": whom}) for whom in ("source", "teachers")]
    assert waits == [1, 4]
    assert _sample(registry, "answers_total", teacher="a:1") == 11
    assert [_sample(registry, "quarantined", teacher=who) for who in ("a:1", "b:1")] == [0, 1]


@pytest.fixture
def port() -> int:
    """One that is free."""
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def test_what_readers_have_done_stays_when_they_are_gone(port: int) -> None:
    """A count that fell would be taken for a new process; what is only so now is over."""
    endpoint = endpoint_at(port)
    first, second = ReaderStats(samples=10, teachers=1, quarantined={"b:1": "lies"}), ReaderStats(samples=5, teachers=2)
    with endpoint.shows(lambda: first):
        with endpoint.shows(lambda: second):
            assert (endpoint.stats().samples, endpoint.stats().teachers) == (15, 3)
        assert (endpoint.stats().samples, endpoint.stats().teachers) == (15, 1)
    assert endpoint.stats() == ReaderStats(samples=15)


def test_a_process_has_one_endpoint_at_a_port(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Its readers share it; another process can't have the same, and a forked child is another."""
    assert endpoint_at(port) is endpoint_at(port)
    monkeypatch.setattr("os.getpid", lambda: 1)
    with pytest.raises(OSError, match="in use"):
        endpoint_at(port)
