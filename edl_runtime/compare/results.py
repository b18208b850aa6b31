"""What a comparison measured: the ways, their runs, and the table of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from edl_runtime.errors import EdlError, SpecError
from edl_runtime.parsing import JsonDecoder

Way = Literal["none", "inprocess", "offline", "service"]
"""The rows of EDL's published table, in its order."""

WAYS: tuple[Way, ...] = get_args(Way)

TITLES: dict[Way, str] = {
    "none": "no distillation",
    "inprocess": "teacher and student in one process",
    "offline": "offline: answers from disk",
    "service": "service distillation",
}


class Spread(NamedTuple):
    """The mean of some runs, and their standard deviation, None for a single run."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return None without values."""
        if not values:
            return None
        return cls(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)

    def text(self, form: str) -> str:
        mean = form.format(self.mean)
        return mean if self.deviation is None else f"{mean} ± {form.format(self.deviation)}"


class MeasuredRun(msgspec.Struct, frozen=True):
    """The metrics that a script has written with `write_result`; others are ignored.

    - `accuracy`: of the trained student, in the script's own unit; 0 to 1 is shown as a percentage.
    - `samples_per_s`: its training speed.
    - `batch_size`: samples of a step, None if unknown.
    """

    accuracy: float
    samples_per_s: float
    batch_size: int | None = None


class _Result(msgspec.Struct, frozen=True):
    metrics: MeasuredRun


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one way, or why it failed.

    - `teachers`, `student`: the devices they ran on, in words.
    - `note`: costs outside the runs, such as the time to write answers.
    - `reason`, `last_lines`: why it failed, and the end of the log; empty otherwise.
    """

    way: Way
    teachers: str
    student: str
    runs: tuple[MeasuredRun, ...] = ()
    note: str = ""
    reason: str = ""
    last_lines: tuple[str, ...] = ()

    @property
    def accuracy(self) -> Spread | None:
        return Spread.of([run.accuracy for run in self.runs])

    @property
    def speed(self) -> Spread | None:
        """In samples/s."""
        return Spread.of([run.samples_per_s for run in self.runs])


@dataclass(eq=False, repr=False)
class RunError(EdlError):
    """Raised when a way can't be measured: a process failed, or wrote no metrics. `last_lines` are of its log."""

    reason: str
    last_lines: Sequence[str] = ()

    def __str__(self) -> str:
        return "\n".join([self.reason, *(f"  {line}" for line in self.last_lines)])


def parse_ways(text: str) -> tuple[Way, ...]:
    """Parse "none,service". Raises SpecError for unknown ways, and for a way given twice."""
    given = tuple(word.strip() for word in text.split(",") if word.strip())
    ways = tuple(way for word in given for way in WAYS if way == word)
    if not ways or len(ways) < len(given) or len(set(ways)) < len(ways):
        raise SpecError("ways", text, f"some of {','.join(WAYS)}, in any order")
    return ways


def measured_run(content: bytes | None) -> MeasuredRun:
    """Decode the result that a script wrote with `write_result`. Raises RunError with the call to make."""
    call = 'edl_runtime.result.write_result(metrics={"accuracy": …, "samples_per_s": …, "batch_size": …})'
    if not content:
        raise RunError(f"the script wrote no result; at its end, call {call}")
    try:
        return JsonDecoder(_Result).decode(content).metrics
    except msgspec.DecodeError as error:
        hint = " (`write_result` writes null for NaN and infinite numbers)" if "`null`" in str(error) else ""
        raise RunError(f"the script's result is not valid: {error}{hint}; at its end, call {call}") from None


HEADINGS = ("", "TEACHERS", "STUDENT", "BATCH", "ACCURACY", "SAMPLES/S", "RELATIVE")


def table_cells(rows: Sequence[ComparisonRow]) -> list[list[str]]:
    """Return the table's cells by row."""
    return [_cells(row, relative_speed(row, rows)) for row in rows]


def relative_speed(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> float | None:
    """Return a row's speed as a multiple of the speed without distillation; None if either is unknown."""
    alone = next((one.speed for one in rows if one.way == "none"), None)
    return row.speed.mean / alone.mean if row.speed and alone and alone.mean else None


def json_rows(rows: Sequence[ComparisonRow]) -> list[dict[str, Any]]:
    """Return the rows with their means, deviations and ratios."""
    return [
        {
            **msgspec.to_builtins(row),
            "accuracy": row.accuracy and row.accuracy._asdict(),
            "samples_per_s": row.speed and row.speed._asdict(),
            "relative": relative_speed(row, rows),
        }
        for row in rows
    ]


def _cells(row: ComparisonRow, ratio: float | None) -> list[str]:
    title = TITLES[row.way] + (f"\n{row.note}" if row.note else "")
    accuracy, speed = row.accuracy, row.speed
    if not accuracy or not speed:
        return [title, row.teachers, row.student, "", "failed", "", ""]
    batches = sorted({run.batch_size for run in row.runs if run.batch_size is not None})
    return [
        title,
        row.teachers,
        row.student,
        ", ".join(map(str, batches)) or "unknown",
        accuracy.text("{:.1%}" if 0 <= accuracy.mean <= 1 else "{:.4g}"),
        speed.text("{:,.0f}" if speed.mean >= 100 else "{:,.3g}"),
        "" if ratio is None else f"{ratio:.2f}",
    ]
