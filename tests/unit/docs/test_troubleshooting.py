"""Texts that docs/troubleshooting.md quotes are those of the code."""

from __future__ import annotations

import re

import pytest
from support.paths import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
FIRST_CELLS = re.findall(r"(?m)^\| (.*?) \|", PAGE)
SPANS = {text for cell in FIRST_CELLS for text in re.findall(r"`([^`]+)`", cell)}
QUOTED = sorted(text for text in SPANS if " " in text and not text.startswith("edl "))
SOURCE = " ".join(
    re.sub(r'"\s*\n\s*f?"', "", file.read_text())
    for package in ("edl_runtime", "edl_airflow")
    for file in sorted((ROOT / package).rglob("*.py"))
)


@pytest.mark.parametrize("text", QUOTED)
def test_a_quoted_text_is_one_of_ours(text: str) -> None:
    """What stands between the names and numbers that a message fills in is in the code."""
    parts = re.split(r"…|'[^']*'|\b\d+\b|\b[A-Z]{4,}\b|\bx\b", text)
    words = [part.strip(" :,.") for part in parts]
    words = [part for part in words if len(part) > 3]
    assert words, "nothing to look for"
    assert [part for part in words if part not in SOURCE] == []
