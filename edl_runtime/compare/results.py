"""What a comparison measured: the ways, their runs, and the table of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from edl_runtime.errors import EdlError, SpecError
from edl_runtime.parsing import JsonDecoder

Way = Literal["none", "inprocess", "offline", "service"]
"""EDL's published table, in its order."""

WAYS: tuple[Way, ...] = get_args(Way)

TITLES: dict[Way, str] = {
    "none": "no distillation",
    "inprocess": "teacher and student in one process",
    "offline": "offline: answers from disk",
    "service": "service distillation",
}

PUBLISHED = ("accuracy", "samples_per_s", "batch_size")
"""What is read of the metrics that a script leaves with `write_result`; the last may be absent."""


class _Result(msgspec.Struct, frozen=True):
    metrics: dict[str, object] = {}


class MeasuredRun(msgspec.Struct, frozen=True):
    """What one run of a script found out about itself.

    - `accuracy`: of the trained student, in the script's own unit; 0 to 1 is shown as a percentage.
    - `samples_per_s`: its training speed.
    - `batch_size`: samples of a step, None if it does not say.
    """

    accuracy: float
    samples_per_s: float
    batch_size: int | None = None


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """One way and what came of it: its runs, or why there are none.

    - `teachers`, `student`: what they ran on, in words.
    - `note`: what else belongs to the way, such as the time to write answers.
    - `reason`, `last_lines`: why it failed, and the end of what the script said; empty when it didn't.
    """

    way: Way
    teachers: str
    student: str
    runs: tuple[MeasuredRun, ...] = ()
    note: str = ""
    reason: str = ""
    last_lines: tuple[str, ...] = ()


class RunError(EdlError):
    """Raised when a way can't be measured: a process failed, or left no figures. `last_lines` are its last."""

    def __init__(self, reason: str, last_lines: Sequence[str] = ()) -> None:
        super().__init__(reason, last_lines)
        self.reason = reason
        self.last_lines = tuple(last_lines)

    def __str__(self) -> str:
        return "\n".join([self.reason, *(f"  {line}" for line in self.last_lines)])


class Spread(NamedTuple):
    """The mean of some runs, and their standard deviation, None of one alone."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)


def parse_ways(text: str) -> tuple[Way, ...]:
    """Read "none,service". Raises SpecError for other words, and for a way named twice."""
    given = tuple(word.strip() for word in text.split(",") if word.strip())
    ways = tuple(way for word in given for way in WAYS if way == word)
    if not ways or len(ways) < len(given) or len(set(ways)) < len(ways):
        raise SpecError("ways", text, f"some of {','.join(WAYS)}, in any order")
    return ways


def measured_run(content: bytes | None) -> MeasuredRun:
    """Read what a script left by `write_result`. Raises RunError that says what to write."""
    wanted = 'edl_runtime.result.write_result(metrics={"accuracy": …, "samples_per_s": …, "batch_size": …})'
    if not content:
        raise RunError(f"the script left no result; at its end, call {wanted}")
    try:
        metrics = JsonDecoder(_Result).decode(content).metrics
    except msgspec.DecodeError as error:
        raise RunError(f"the script's result can't be read ({error}); at its end, call {wanted}") from None
    if missing := [name for name in PUBLISHED[:2] if name not in metrics]:
        there = ", ".join(metrics) or "none"
        raise RunError(f"the script's metrics have no {' and no '.join(missing)} (there are: {there}); call {wanted}")
    if unknown := [name for name in PUBLISHED if name in metrics and metrics[name] is None]:
        raise RunError(f"the script's {' and '.join(unknown)} can't be compared: not a finite number (NaN?)")
    try:
        return msgspec.convert({name: metrics[name] for name in PUBLISHED if name in metrics}, MeasuredRun)
    except msgspec.ValidationError as error:
        raise RunError(f"the script's metrics can't be compared: {error}; they have to be numbers") from None


# The table


HEADINGS = ("", "TEACHERS", "STUDENT", "BATCH", "ACCURACY", "SAMPLES/S", "RELATIVE")


def table_cells(rows: Sequence[ComparisonRow]) -> list[list[str]]:
    """Return the table's cells, a list for each row."""
    return [_cells(row, relative_speed(row, rows)) for row in rows]


def relative_speed(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> float | None:
    """Return a row's speed as a multiple of that without distillation; None where either is not known."""
    alone = next((_speeds(one.runs) for one in rows if one.way == "none" and one.runs), ())
    if not alone or not row.runs or not Spread.of(alone).mean:
        return None
    return Spread.of(_speeds(row.runs)).mean / Spread.of(alone).mean


def json_rows(rows: Sequence[ComparisonRow]) -> list[dict[str, Any]]:
    """Return the rows with their means, deviations and ratios, for JSON."""
    return [
        {
            **msgspec.to_builtins(row),
            "accuracy": _spread_dict(Spread.of([run.accuracy for run in row.runs])) if row.runs else None,
            "samples_per_s": _spread_dict(Spread.of(_speeds(row.runs))) if row.runs else None,
            "relative": relative_speed(row, rows),
        }
        for row in rows
    ]


def _cells(row: ComparisonRow, ratio: float | None) -> list[str]:
    title = TITLES[row.way] + (f"\n{row.note}" if row.note else "")
    if not row.runs:
        return [title, row.teachers, row.student, "", "failed", "", ""]
    batches = sorted({run.batch_size for run in row.runs if run.batch_size is not None})
    return [
        title,
        row.teachers,
        row.student,
        ", ".join(map(str, batches)) or "not said",
        _accuracy(Spread.of([run.accuracy for run in row.runs])),
        _speed(Spread.of(_speeds(row.runs))),
        "" if ratio is None else f"{ratio:.2f}",
    ]


def _accuracy(accuracy: Spread) -> str:
    share = 0 <= accuracy.mean <= 1
    return _with_deviation(accuracy, "{:.1%}" if share else "{:.4g}")


def _speed(speed: Spread) -> str:
    return _with_deviation(speed, "{:,.0f}" if speed.mean >= 100 else "{:,.3g}")


def _with_deviation(spread: Spread, form: str) -> str:
    mean = form.format(spread.mean)
    return mean if spread.deviation is None else f"{mean} ± {form.format(spread.deviation)}"


def _spread_dict(spread: Spread) -> dict[str, float | None]:
    return spread._asdict()


def _speeds(runs: Sequence[MeasuredRun]) -> list[float]:
    return [run.samples_per_s for run in runs]
