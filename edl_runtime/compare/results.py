"""What a comparison measured: the ways, their runs, and the table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from edl_runtime.compare.intervals import Gain, Spread
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
    - `seeds`: those of the runs, empty if the script was given none.
    - `note`: costs outside the runs, such as the time to write answers.
    - `reason`, `last_lines`: why it failed, and the end of the log; empty otherwise.
    """

    way: Way
    teachers: str
    student: str
    runs: tuple[MeasuredRun, ...] = ()
    seeds: tuple[int, ...] = ()
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


def accuracy_gain(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> Gain | None:
    """Return a row's accuracy over that without distillation; None for less than two runs of either.

    Runs are paired if both rows have the same seeds.
    """
    alone = next((one for one in rows if one.way == "none"), None)
    if alone is None or alone is row:
        return None
    accuracies = [[run.accuracy for run in each.runs] for each in (row, alone)]
    return Gain.of(*accuracies, paired=bool(row.seeds) and row.seeds == alone.seeds)


def interval_lines(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return what the table's intervals are, and a sentence for each gain; nothing if each way ran once."""
    runs = max((len(row.runs) for row in rows), default=0)
    if runs < 2:
        return []
    lines = [f"± is the 95 % confidence interval of the mean of {runs} runs (Student's t)."]
    for row in rows:
        if (gain := accuracy_gain(row, rows)) and row.accuracy:
            share = 0 <= row.accuracy.mean <= 1
            mean, low, high = (
                f"{100 * value:+.2f}" if share else f"{value:+.4g}" for value in (gain.mean, gain.low, gain.high)
            )
            gained = f"{mean} points" if share else mean
            pairs = "paired by seed" if gain.paired else "independent runs"
            lines.append(
                f"{row.way}: accuracy {gained} against none, 95 % interval {low} to {high} ({pairs}): {gain.verdict}"
            )
    return lines


def json_rows(rows: Sequence[ComparisonRow]) -> list[dict[str, Any]]:
    """Return the rows with their means, intervals, gains and ratios."""
    return [
        {
            **msgspec.to_builtins(row),
            "accuracy": row.accuracy and row.accuracy._asdict(),
            "samples_per_s": row.speed and row.speed._asdict(),
            "accuracy_gain": (gain := accuracy_gain(row, rows)) and {**gain._asdict(), "verdict": gain.verdict},
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
