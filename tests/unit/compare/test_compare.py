"""What a comparison reads of a script's result, what a person may ask for, and what is shown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from edl_runtime.cli.compare import compare
from edl_runtime.compare.child_processes import LAST_LINES, TAIL_BYTES, last_lines
from edl_runtime.compare.comparison import split_pure
from edl_runtime.compare.results import (
    ComparisonRow,
    MeasuredRun,
    RunError,
    Way,
    accuracy_gain,
    interval_lines,
    json_rows,
    measured_run,
    parse_ways,
    relative_speed,
    table_cells,
)
from edl_runtime.errors import SpecError
from edl_runtime.teacher.errors import ModelError


def test_accuracy_speed_and_batch_are_read() -> None:
    """What else a script found out is its own business."""
    metrics = {"accuracy": 0.9, "samples_per_s": 120, "batch_size": 16, "loss": 0.1}
    result = msgspec.json.encode({"checkpoint": "/c", "metrics": metrics})
    assert measured_run(result) == MeasuredRun(0.9, 120.0, 16)
    del metrics["batch_size"]
    assert measured_run(msgspec.json.encode({"metrics": metrics})).batch_size is None


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (None, "wrote no result; at its end, call .*write_result"),
        (b"", "wrote no result"),
        (b"{}", "missing required field `metrics`; at its end, call .*write_result"),
        (b'{"metrics":[]}', "the script's result is not valid: .*write_result"),
        (b"[" * 5000, "the script's result is not valid: .*write_result"),
        (b'{"metrics":{}}', r"missing required field `accuracy` - at `\$.metrics`; at its end, call .*write_result"),
        (b'{"metrics":{"accuracy":1,"speed":2}}', "missing required field `samples_per_s`"),
        (
            b'{"metrics":{"accuracy":"good","samples_per_s":1}}',
            r"Expected `float`, got `str` - at `\$.metrics.accuracy`",
        ),
        (b'{"metrics":{"accuracy":0.5,"samples_per_s":null}}', r"got `null` - at `\$.metrics.samples_per_s` .*NaN"),
    ],
)
def test_the_error_of_a_wrong_result_shows_what_to_write(result: bytes | None, complaint: str) -> None:
    """The reason names what is there, and the call that leaves what is not."""
    with pytest.raises(RunError, match=complaint):
        measured_run(result)


def test_ways_come_in_the_order_they_are_named() -> None:
    """Any of them may be left out."""
    assert parse_ways("service, none") == ("service", "none")


@pytest.mark.parametrize("text", ["", ",", "servce", "none,none", "none;service"])
def test_other_words_for_ways_are_refused(text: str) -> None:
    """The error names those that there are."""
    with pytest.raises(SpecError, match="none,inprocess,offline,service"):
        parse_ways(text)


@pytest.mark.parametrize(
    ("model", "script", "said"),
    [
        ("nowhere.onnx", "train.py", "nowhere.onnx"),
        ("nowhere", "train.py", "nowhere"),
        ("a.module:teach", "missing.py", "missing.py"),
    ],
)
def test_a_missing_model_or_script_is_an_error_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, script: str, said: str
) -> None:
    """The first way trains without teachers, for as long as that takes."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("open('ran', 'w')")
    ran = CliRunner().invoke(compare, ["--model", model, "--", "python", script])
    assert isinstance(ran.exception, ModelError | SpecError)
    assert said in str(ran.exception)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("pure", "split"),
    [
        ("", ({}, [])),
        ("--distill=no --x 'a b'", ({}, ["--distill=no", "--x", "a b"])),
        ("DISTILL=0 NAME= --n a=b", ({"DISTILL": "0", "NAME": ""}, ["--n", "a=b"])),
    ],
)
def test_pure_has_variables_and_flags(pure: str, split: tuple[dict[str, str], list[str]]) -> None:
    """As in a shell, variables come first."""
    assert split_pure(pure) == split


def test_the_last_lines_of_a_log_are_found_at_its_end(tmp_path: Path) -> None:
    """Those that say anything, of a log that may be empty, short, or too long to be read each time."""
    log = tmp_path / "log"
    log.write_text("")
    assert last_lines(log) == []
    log.write_text("one\n\n  two\n   \n")
    assert last_lines(log) == ["one", "  two"]
    log.write_text("".join(f"{number} \n" for number in range(TAIL_BYTES)))
    assert last_lines(log) == [str(number) for number in range(TAIL_BYTES - LAST_LINES, TAIL_BYTES)]
    log.write_bytes(b"e\xcc\x81\n" + b"\xff" * (2 * TAIL_BYTES))
    assert [len(line) for line in last_lines(log)] == [TAIL_BYTES]


def row(way: Way, *runs: MeasuredRun, reason: str = "", seeds: tuple[int, ...] = ()) -> ComparisonRow:
    return ComparisonRow(way=way, teachers="2 on CPU", student="1 CPU core", runs=runs, reason=reason, seeds=seeds)


def accuracies(way: Way, *values: float, seeded: bool) -> ComparisonRow:
    return row(way, *(MeasuredRun(value, 1) for value in values), seeds=tuple(range(len(values))) if seeded else ())


ALONE = row("none", MeasuredRun(0.8, 1000, 32), MeasuredRun(0.9, 3000, 32))
SERVED = row("service", MeasuredRun(0.95, 1500, 32))
FAILED = row("inprocess", reason="the script exited with 1")


def test_speeds_are_shown_beside_those_without_distillation() -> None:
    """Wherever in the order that stands; several runs have a mean with its interval, one has none."""
    assert table_cells([SERVED, ALONE]) == [
        ["service distillation", "2 on CPU", "1 CPU core", "32", "95.0%", "1,500", "0.75"],
        ["no distillation", "2 on CPU", "1 CPU core", "32", "85.0% ± 63.5%", "2,000 ± 12,706", "1.00"],
    ]


def test_a_failed_way_has_no_figures() -> None:
    """And leaves those of the others alone; without the first way there is nothing to be relative to."""
    [shown, _] = table_cells([FAILED, ALONE])
    assert shown[4:] == ["failed", "", ""]
    assert relative_speed(FAILED, [FAILED, ALONE]) is None
    assert relative_speed(SERVED, [SERVED, row("none", reason="it broke")]) is None


@pytest.mark.parametrize(
    ("measured", "shown"),
    [
        (MeasuredRun(76.53, 4.3217), ["unknown", "76.53", "4.32"]),
        (MeasuredRun(1.0, 99.5, 1), ["1", "100.0%", "99.5"]),
        (MeasuredRun(-3.0, 0.0, 1), ["1", "-3", "0"]),
    ],
)
def test_figures_are_shown_as_they_are(measured: MeasuredRun, shown: list[str]) -> None:
    """A share as a percentage, other measures of quality as the number that the script gave."""
    assert table_cells([row("service", measured)])[0][3:6] == shown


def test_gains_are_of_pairs_with_one_seed_or_of_independent_runs() -> None:
    """Seeds differ more than the ways do, so pairs show a gain that independent runs don't."""
    alone, served = (0.80, 0.84, 0.88), (0.81, 0.86, 0.89)
    paired = [accuracies("none", *alone, seeded=True), accuracies("service", *served, seeded=True)]
    unpaired = [accuracies("none", *alone, seeded=False), accuracies("service", *served, seeded=False)]
    gained = "accuracy +1.33 points against none, 95 % interval -0.10 to +2.77 (paired by seed): no difference shown"
    assert interval_lines(paired) == [
        "± is the 95 % confidence interval of the mean of 3 runs (Student's t).",
        f"service: {gained}",
    ]
    gain = accuracy_gain(unpaired[1], unpaired)
    assert gain is not None
    assert gain == pytest.approx((0.0133, -0.0778, 0.1045, False), abs=1e-3)
    assert interval_lines([ALONE, SERVED])[1:] == []
    assert interval_lines([SERVED]) == []


def test_programs_get_every_run() -> None:
    """With the means that the table shows, and the reason of what failed."""
    alone, failed = json_rows([ALONE, FAILED])
    assert alone["runs"][1] == {"accuracy": 0.9, "samples_per_s": 3000, "batch_size": 32}
    assert (alone["samples_per_s"]["mean"], alone["relative"], alone["accuracy_gain"]) == (2000, 1, None)
    assert (failed["reason"], failed["accuracy"], failed["relative"]) == (FAILED.reason, None, None)
