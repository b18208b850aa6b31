"""What a reader delivers, what a script waits for, and what Prometheus is shown of both."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from functools import partial

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from support.network.ports import free_ports
from support.students.fake_readers import BATCHES, ROWS, batches, reader_of
from support.teachers.fakes import arithmetic
from support.teachers.process import wait_until

from edl_runtime.distill.metrics import HOST, ReaderCollector, metrics_endpoint
from edl_runtime.distill.stats import DeliveryCounter, ReaderStats, StatsOfReaders, combined_stats
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings


def test_a_wait_that_goes_on_counts() -> None:
    """A script that waits for a minute is seen to wait long before that is over."""
    tally = DeliveryCounter(0.0)
    tally.begin_epoch(100.0)
    tally.begin_wait("source", 100.0)
    tally.await_teachers(102.0)
    during = tally.stats([], {}, 120.0)
    assert (during.waited_s, during.waited_for_source_s, during.waiting) == (20, 2, 1)
    tally.end_wait(120.0)
    tally.deliver(samples=8, cached=0, answered_by=["a:1"], now=120.0)
    after = tally.stats([], {}, 125.0)
    assert (after.waited_s, after.waited_for_source_s) == (20, 2)
    assert after.waiting == pytest.approx(0.5)


def test_readers_of_one_script_add_up() -> None:
    """Counts are sums, and who answered both has its answers together."""
    first = ReaderStats(
        batches=2, samples=20, teachers=1, answered={"a:1": 2}, waiting=0.7, waited_s=3, epoch=4, cached=8
    )
    second = ReaderStats(batches=1, samples=5, teachers=2, answered={"a:1": 1, "b:2": 1}, waiting=0.6, retries=2)
    both = combined_stats([first, second])
    assert (both.batches, both.samples, both.teachers, both.retries, both.epoch) == (3, 25, 3, 2, 0)
    assert both.cached == 8
    assert both.answered == {"a:1": 3, "b:2": 1}
    assert (both.waiting, both.waited_s) == (1, 3)
    assert combined_stats([]) == ReaderStats()


@pytest.mark.parametrize("slow", ["source", "teachers"])
def test_waits_are_for_the_source_or_for_teachers(slow: str) -> None:
    """While it waits: a source that is slow is not mistaken for teachers that are."""

    def seen_to_wait(whom: str, number: float) -> None:
        if (whom, number) == (slow, 5):
            wait_until(lambda: waited_for()[whom] > 0.05)

    def waited_for() -> dict[str, float]:
        stats = reader.stats()
        return {"source": stats.waited_for_source_s, "teachers": stats.waited_s - stats.waited_for_source_s}

    def source() -> Iterator[tuple[Array, Array]]:
        for number, batch in enumerate(batches()):
            seen_to_wait("source", number)
            yield batch

    def teacher(x: Array) -> dict[str, Array]:
        seen_to_wait("teachers", x[0, 0])
        return arithmetic(x)

    with reader_of({"a:1": teacher}, source) as reader:
        list(reader)


def _sample(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"edl_distill_{name}", labels)


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
    stats = ReaderStats(
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
    registry = CollectorRegistry(auto_describe=True)
    registry.register(ReaderCollector(lambda: stats))
    counts = ("batches", "samples", "cached_samples", "retries", "hedges")
    assert [_sample(registry, f"{name}_total") for name in counts] == [1, 2, 3, 8, 9]
    assert [_sample(registry, name) for name in ("queued_requests", "requests_in_flight", "teachers")] == [6, 7, 10]
    waits = [_sample(registry, "wait_seconds_total", **{"for": whom}) for whom in ("source", "teachers")]
    assert waits == [1, 4]
    assert _sample(registry, "answers_total", teacher="a:1") == 11
    assert [_sample(registry, "quarantined", teacher=who) for who in ("a:1", "b:1")] == [0, 1]


@pytest.fixture
def port() -> int:
    """One that is free."""
    return free_ports(1)[0]


def _scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {sample.name.removeprefix("edl_distill_"): sample.value for family in families for sample in family.samples}


def test_a_reader_is_scraped_while_it_reads(port: int) -> None:
    """On this machine only."""
    with capture_logs() as logs, reader_of({"a:1": arithmetic}, settings=RuntimeSettings(metrics_port=port)) as reader:
        epoch = iter(reader)
        for taken in (1, 2):
            next(epoch)
            wait_until(lambda: "metrics.shown" in [entry["event"] for entry in logs])
            shown = _scraped(port)
            assert (shown["batches_total"], shown["samples_total"]) == (taken, ROWS * taken)
            assert (shown["answers_total"], shown["teachers"]) == (3 * taken, 1)
    with socket.socket() as other_address:
        assert other_address.connect_ex(("127.0.0.2", port)) != 0


def test_a_reader_whose_port_is_taken_reads_without_metrics() -> None:
    """Which the log says."""
    with socket.create_server((HOST, 0)) as other, capture_logs() as logs:
        settings = RuntimeSettings(metrics_port=other.getsockname()[1])
        with reader_of({"a:1": arithmetic}, settings=settings) as reader:
            epoch = iter(reader)
            next(epoch)
            wait_until(lambda: "metrics.not_shown" in [entry["event"] for entry in logs])
            assert len(list(epoch)) == BATCHES - 1


def test_counts_of_closed_readers_stay() -> None:
    """A count that fell would be taken for a new process; what describes the present goes with the reader."""
    readers = StatsOfReaders()
    stats = [ReaderStats(samples=10, teachers=1, quarantined={"b:1": "lies"}), ReaderStats(samples=5, teachers=2)]
    first, second = [partial(stats.__getitem__, number) for number in range(2)]
    readers.add(first)
    readers.add(second)
    assert (readers.stats().samples, readers.stats().teachers) == (15, 3)
    readers.remove(second)
    readers.remove(second)
    assert (readers.stats().samples, readers.stats().teachers) == (15, 1)
    readers.remove(first)
    assert readers.stats() == ReaderStats(samples=15)


def test_a_process_has_one_endpoint_at_a_port(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Its readers share it; another process can't have the same, and a forked child is another."""
    assert metrics_endpoint(port) is metrics_endpoint(port)
    monkeypatch.setattr("os.getpid", lambda: 1)
    with pytest.raises(OSError, match="in use"):
        metrics_endpoint(port)
