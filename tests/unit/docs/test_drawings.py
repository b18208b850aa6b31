"""The drawings in docs/images are those of `scripts/drawings.py`."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import drawings
import pytest


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_drawing_is_current(name: str) -> None:
    """Whoever changes the script also writes the drawings, which pages show without running it."""
    svg = (drawings.IMAGES / f"{name}.svg").read_text()
    assert svg == drawings.DRAWINGS[name]()
    assert ET.fromstring(svg).tag.endswith("svg")
