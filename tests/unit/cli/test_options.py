"""Lengths of time, as flags give them."""

from __future__ import annotations

import pytest

from edl_runtime.cli.options import parse_duration, print_table
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
