"""The table of a comparison."""

from __future__ import annotations

import pytest

from edl_runtime.compare.table import cells, plain, relative
from edl_runtime.compare.ways import Measured, Row, Way


def row(way: Way, *runs: Measured, reason: str = "") -> Row:
    return Row(way=way, teachers="2 on CPU", student="1 CPU core", runs=runs, reason=reason)


ALONE = row("none", Measured(0.8, 1000, 32), Measured(0.9, 3000, 32))
SERVED = row("service", Measured(0.95, 1500, 32))
FAILED = row("inprocess", reason="the script ended with exit status 1")


def test_speeds_are_shown_beside_those_without_distillation() -> None:
    """Wherever in the order that stands; several runs have a mean and a standard deviation, one has none."""
    assert cells([SERVED, ALONE]) == [
        ["service distillation", "2 on CPU", "1 CPU core", "32", "95.0%", "1,500", "0.75"],
        ["no distillation", "2 on CPU", "1 CPU core", "32", "85.0% ± 7.1%", "2,000 ± 1,414", "1.00"],
    ]


def test_a_failed_way_has_no_figures() -> None:
    """And leaves those of the others alone; without the first way there is nothing to be relative to."""
    [shown, _] = cells([FAILED, ALONE])
    assert shown[4:] == ["failed", "", ""]
    assert relative(FAILED, [FAILED, ALONE]) is None
    assert relative(SERVED, [SERVED, row("none", reason="it broke")]) is None


@pytest.mark.parametrize(
    ("measured", "shown"),
    [
        (Measured(76.53, 4.3217), ["not said", "76.53", "4.32"]),
        (Measured(1.0, 99.5, 1), ["1", "100.0%", "99.5"]),
        (Measured(-3.0, 0.0, 1), ["1", "-3", "0"]),
    ],
)
def test_figures_are_shown_as_they_are(measured: Measured, shown: list[str]) -> None:
    """A share as a percentage, other measures of quality as the number that the script gave."""
    assert cells([row("service", measured)])[0][3:6] == shown


def test_programs_get_every_run() -> None:
    """With the means that the table shows, and the reason of what failed."""
    alone, failed = plain([ALONE, FAILED])
    assert alone["runs"][1] == {"accuracy": 0.9, "samples_per_s": 3000, "batch_size": 32}
    assert (alone["samples_per_s"]["mean"], alone["relative"]) == (2000, 1)
    assert (failed["reason"], failed["accuracy"], failed["relative"]) == (FAILED.reason, None, None)
