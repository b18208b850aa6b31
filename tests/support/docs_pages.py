"""The pages of the docs, and the code in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted(each for each in (ROOT / "docs").rglob("*.md") if "adr" not in each.parts)]

FENCE = re.compile(r"(?ms)^(?P<indent> *)```(?P<language>[\w{}-]*)[^\n`]*\n(?P<block>.*?)^(?P=indent)```$")


def blocks(page: Path, *languages: str) -> Iterator[tuple[int, str, str]]:
    """Yield each fenced block in one of these languages, "" for none: its line, its language and its text."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        if found["language"] in languages:
            yield text.count("\n", 0, found.start()) + 1, found["language"], found["block"]
