"""The script that gets the examples' data."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import datasets
import pytest


def test_what_is_not_to_be_had_leaves_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script fails and says which package it wanted; tests find the reason, and the next try begins anew."""
    monkeypatch.setattr(datasets, "DATASETS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["datasets.py", "fashion"])
    monkeypatch.setitem(os.environ, "PATH", "")
    with pytest.raises(SystemExit) as ended:
        datasets.main()
    assert ended.value.code == 1
    assert "not available from Debian package dataset-fashion-mnist: apt-get can't be" in capsys.readouterr().out
    assert "apt-get can't be started" in (tmp_path / "fashion" / "unavailable").read_text()

    monkeypatch.setitem(
        datasets.SETS, "fashion", datasets.SETS["fashion"]._replace(fetch=lambda folder: (folder / "data").touch())
    )
    assert [file.name for file in datasets.get("fashion").iterdir()] == ["data"]
    assert [folder.name for folder in tmp_path.iterdir()] == ["fashion"]


def test_a_name_that_it_does_not_know_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With those that it knows."""
    monkeypatch.setattr(sys, "argv", ["datasets.py", "cifar"])
    with pytest.raises(SystemExit):
        datasets.main()
    assert "got 'cifar', allowed is " in capsys.readouterr().err
