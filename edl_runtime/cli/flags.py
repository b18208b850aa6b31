"""What several commands' flags mean."""

from __future__ import annotations

import re

from edl_runtime.errors import SpecError

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""Seconds of what times are told in."""


def words(text: str) -> tuple[str, ...]:
    """Return what a flag lists, as in a,b."""
    return tuple(word for word in text.split(",") if word)


def parse_gpu_ids(text: str) -> tuple[int, ...]:
    """Return the GPUs in `--gpu_ids`; empty is the CPU. Raises SpecError."""
    if not all(word.isdecimal() for word in words(text)):
        raise SpecError("gpu_ids", text, "numbers, as in 0,1")
    return tuple(map(int, words(text)))


def seconds(flag: str, text: str) -> float:
    """Return a time above 0 as in 30s, 90m, 6h or 7d. Raises SpecError that names the flag."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd])", text)
    if not found or not float(found[1]):
        raise SpecError(flag, text, "a time above 0, as in 30s, 90m, 6h or 7d")
    return float(found[1]) * UNITS_S[found[2]]
