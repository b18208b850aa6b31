"""Types for argparse: a wrong value ends the script, which says what was given and what is allowed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

LARGEST_SEED = 2**31 - 1


def whole(least: int, most: int | None = None, *, multiple_of: int = 1) -> Callable[[str], int]:
    """Return a type for whole numbers from `least` to `most`."""
    upto = f" to {most}" if most is not None else " or more"
    allowed = f"{least}{upto}" + (f", a multiple of {multiple_of}" if multiple_of > 1 else "")

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most) or number % multiple_of:
            raise argparse.ArgumentTypeError(f"got {text!r}, allowed is {allowed}")
        return number

    return read


def above_zero(text: str) -> float:
    """Read a number above 0."""
    return _number(text, lambda value: 0 < value < math.inf, "a number above 0")


def share(text: str) -> float:
    """Read a number from 0 to 1."""
    return _number(text, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def yes_or_no(text: str) -> bool:
    """Read True or False, as the original's scripts have them."""
    if text.lower() not in {"true", "false", "1", "0", "yes", "no"}:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is True or False")
    return text.lower() in {"true", "1", "yes"}


def _number(text: str, allows: Callable[[float], bool], allowed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not allows(value):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is {allowed}")
    return value
