"""The comparison as a table for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from edl_runtime.compare.ways import TITLES, Measured, Row, Spread

HEADINGS = ("", "TEACHERS", "STUDENT", "BATCH", "ACCURACY", "SAMPLES/S", "RELATIVE")


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table's cells, a list for each row."""
    return [_cells(row, relative(row, rows)) for row in rows]


def relative(row: Row, rows: Sequence[Row]) -> float | None:
    """Return a row's speed as a multiple of that without distillation; None where either is not known."""
    alone = next((_speeds(one.runs) for one in rows if one.way == "none" and one.runs), ())
    if not alone or not row.runs or not Spread.of(alone).mean:
        return None
    return Spread.of(_speeds(row.runs)).mean / Spread.of(alone).mean


def plain(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows with their means, deviations and ratios, for JSON."""
    return [
        {
            **msgspec.to_builtins(row),
            "accuracy": _plain(Spread.of([run.accuracy for run in row.runs])) if row.runs else None,
            "samples_per_s": _plain(Spread.of(_speeds(row.runs))) if row.runs else None,
            "relative": relative(row, rows),
        }
        for row in rows
    ]


def _cells(row: Row, ratio: float | None) -> list[str]:
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


def _plain(spread: Spread) -> dict[str, float | None]:
    return spread._asdict()


def _speeds(runs: Sequence[Measured]) -> list[float]:
    return [run.samples_per_s for run in runs]
