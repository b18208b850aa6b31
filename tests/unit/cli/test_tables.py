"""Tables on a terminal."""

from __future__ import annotations

import pytest

from edl_runtime.cli.tables import print_table


def test_nothing_is_cut_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is there to be copied, however narrow the terminal is."""
    monkeypatch.setenv("COLUMNS", "40")
    print_table(["NAME", "SAID"], [["a" * 52, "it is [bold] " * 5], ["b", ""]])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "a" * 52, "b"]
    assert lines[1].endswith("it is [bold] " * 5)
