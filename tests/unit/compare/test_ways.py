"""What is read of a script's result, and what a person may ask for."""

from __future__ import annotations

import msgspec
import pytest

from edl_runtime.compare.comparison import Comparison, split_pure
from edl_runtime.compare.ways import Measured, RunError, measured_from, parse_ways
from edl_runtime.errors import SpecError


def test_accuracy_speed_and_batch_are_read() -> None:
    """What else a script found out is its own business."""
    metrics = {"accuracy": 0.9, "samples_per_s": 120, "batch_size": 16, "loss": 0.1}
    result = msgspec.json.encode({"checkpoint": "/c", "metrics": metrics})
    assert measured_from(result) == Measured(0.9, 120.0, 16)
    del metrics["batch_size"]
    assert measured_from(msgspec.json.encode({"metrics": metrics})).batch_size is None


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (None, "left no result; at its end, call .*write_result"),
        (b"", "left no result"),
        (b'{"metrics":{}}', r"no accuracy and no samples_per_s \(there are: none\); call .*write_result"),
        (b'{"metrics":{"accuracy":1,"speed":2}}', r"no samples_per_s \(there are: accuracy, speed\)"),
        (b'{"metrics":{"accuracy":"good","samples_per_s":1}}', r"Expected `float`, got `str` - at `\$.accuracy`"),
        (b'{"metrics":{"accuracy":0.5,"samples_per_s":null}}', "the script's samples_per_s .*NaN"),
    ],
)
def test_a_result_that_cant_be_compared_says_what_to_write(result: bytes | None, complaint: str) -> None:
    """The reason names what is there, and the call that leaves what is not."""
    with pytest.raises(RunError, match=complaint):
        measured_from(result)


def test_ways_come_in_the_order_they_are_named() -> None:
    """Any of them may be left out."""
    assert parse_ways("service, none") == ("service", "none")


@pytest.mark.parametrize("text", ["", ",", "servce", "none,none", "none;service"])
def test_other_words_for_ways_are_refused(text: str) -> None:
    """The error names those that there are."""
    with pytest.raises(SpecError, match="none,inprocess,offline,service"):
        parse_ways(text)


@pytest.mark.parametrize("field", ["teachers", "repeat"])
def test_nothing_is_compared_with_no_teacher_or_run(field: str) -> None:
    """The error names what was asked for."""
    with pytest.raises(SpecError, match=field):
        Comparison(model="m", command=("python",), **{field: 0})


@pytest.mark.parametrize(
    ("pure", "split"),
    [
        ("", ({}, [])),
        ("--distill=no --x 'a b'", ({}, ["--distill=no", "--x", "a b"])),
        ("DISTILL=0 NAME= --n a=b", ({"DISTILL": "0", "NAME": ""}, ["--n", "a=b"])),
    ],
)
def test_a_script_is_told_by_flags_or_variables(pure: str, split: tuple[dict[str, str], list[str]]) -> None:
    """As in a shell, variables come first."""
    assert split_pure(pure) == split
