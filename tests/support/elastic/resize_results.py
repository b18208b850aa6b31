"""Checks of the results of benchmarks/resize.py."""

from __future__ import annotations

from typing import Any


def check_resumed(found: dict[str, Any]) -> None:
    """Check that training resumed after each resize, live, from the same step."""
    assert {result["case"] for result in found["results"]} == {"join", "leave", "trainer killed"}
    for result in found["results"]:
        assert result["not_resumed"] == 0
        assert result["steps_repeated"] == 0
        assert result["gears"] == ["live"]
        assert 0 < result["pause_s"] <= result["worst_pause_s"]
    assert all("paused for" in line or "times as long" in line for line in found["missed"])
