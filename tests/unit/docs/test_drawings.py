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


def test_the_moving_picture_shows_what_was_recorded() -> None:
    """A training by `scripts/moving_picture.py`, with its two resizes and their pauses."""
    svg = (drawings.IMAGES / "elastic.svg").read_text()
    assert "<animate " in svg
    assert ET.fromstring(svg).tag.endswith("svg")
    assert [size for size in (3, 1) if f"$ edl resize digits {size}" not in svg] == []
    assert "pause 0." in svg
