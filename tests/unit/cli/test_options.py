"""Lengths of time, as flags give them."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from edl_runtime.cli.options import parse_duration, print_table, tell, tell_json_line
from edl_runtime.errors import SpecError


@pytest.mark.parametrize(("text", "expected"), [("30s", 30), ("90m", 5400), ("1.5h", 5400), ("7d", 604800)])
def test_a_time_has_a_unit(text: str, expected: float) -> None:
    """Seconds, minutes, hours or days."""
    assert parse_duration("--history", text) == expected


@pytest.mark.parametrize("text", ["", "6", "h", "-1h", "6 h", "0s", "1w", "nan", "1h30m"])
def test_what_is_no_time_is_an_error(text: str) -> None:
    """It names the flag, what was given and what is allowed."""
    with pytest.raises(SpecError, match=r"--history: got .* allowed is a time above 0, as in 30s"):
        parse_duration("--history", text)


def test_nothing_is_cut_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is there to be copied, however narrow the terminal is."""
    monkeypatch.setenv("COLUMNS", "40")
    print_table(["NAME", "SAID"], [["a" * 52, "it is [bold] " * 5], ["b", ""]])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "a" * 52, "b"]
    assert lines[1].endswith("it is [bold] " * 5)


class Full(io.StringIO):
    """A stream that fails to take anything, for this reason."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, text)


def test_a_command_that_goes_on_is_not_ended_by_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike one whose reader has gone."""
    monkeypatch.setattr(sys, "stdout", Full(errno.ENOSPC))
    tell("ready")
    tell_json_line({"url": "x"})
    monkeypatch.setattr(sys, "stdout", Full(errno.EPIPE))
    with pytest.raises(BrokenPipeError):
        tell("ready")
