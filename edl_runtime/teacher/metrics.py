"""What a teacher has done, as Prometheus reads it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows of a run, as they are told apart."""

DROPPED = 499
"""In place of an HTTP status: the request was dropped, for its client had gone."""


class Metrics:
    """Plain numbers: counting costs next to nothing, and what is shown is put together when it is asked for.

    `gauges` are asked then, by name: what each means, and its value.
    """

    def __init__(self) -> None:
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self._answers: Counter[int] = Counter()
        self._runs = [0] * (len(BOUNDS) + 1)
        self._rows = 0
        self._busy_s = 0.0

    def answered(self, status: int) -> None:
        """Count an answer, or a request that was dropped."""
        self._answers[status] += 1

    def ran(self, rows: int, busy_s: float) -> None:
        """Count a run of the model."""
        self._runs[bisect_left(BOUNDS, rows)] += 1
        self._rows += rows
        self._busy_s += busy_s

    def render(self) -> bytes:
        """Return all of it in Prometheus's text format."""
        return "".join(f"{line}\n" for line in self._lines()).encode()

    def _lines(self) -> Iterator[str]:
        name = "edl_teacher_requests_total"
        yield from _about(name, "counter", f"Requests by HTTP status of the answer; {DROPPED}: their client had gone.")
        for status, count in sorted(self._answers.items()):
            yield f'{name}{{status="{status}"}} {count}'
        name = "edl_teacher_run_rows"
        yield from _about(name, "histogram", "Rows of the model's runs, each of which may answer several requests.")
        for bound, count in zip((*BOUNDS, "+Inf"), accumulate(self._runs), strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f"{name}_sum {self._rows}"
        yield f"{name}_count {sum(self._runs)}"
        name = "edl_teacher_busy_seconds_total"
        yield from _about(name, "counter", "Seconds that the model ran, on all devices together.")
        yield f"{name} {self._busy_s:.6f}"
        for name, (meaning, value) in self.gauges.items():
            yield from _about(name, "gauge", meaning)
            yield f"{name} {value()}"


def _about(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"
