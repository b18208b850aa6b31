"""Which student uses which teachers: a pure function that every student computes alike."""

from __future__ import annotations

from collections.abc import Mapping


def assign(teachers: Mapping[str, float], students: Mapping[str, int | None]) -> dict[str, tuple[str, ...]]:
    """Return the teacher ids of each student."""
    raise NotImplementedError
