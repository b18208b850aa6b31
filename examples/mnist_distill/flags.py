"""Types for argparse: a wrong value ends the script with a message that names the allowed ones."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from edl_runtime.distill import Fixed

T = TypeVar("T")
LARGEST_SEED = 2**31 - 1


def checked(kind: Callable[[str], T], allows: Callable[[T], bool], allowed: str) -> Callable[[str], T]:
    """Return a type for values of `kind` that `allows` accepts."""

    def read(text: str) -> T:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if allows(value):
                return value
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is {allowed}")

    return read


def whole(least: int, most: int | None = None, *, multiple_of: int = 1) -> Callable[[str], int]:
    """Return a type for whole numbers from `least` to `most`."""
    upto = f" to {most}" if most is not None else " or more"
    allowed = f"{least}{upto}" + (f", a multiple of {multiple_of}" if multiple_of > 1 else "")
    top = math.inf if most is None else most
    return checked(int, lambda number: least <= number <= top and number % multiple_of == 0, allowed)


above_zero = checked(float, lambda value: 0 < value < math.inf, "a number above 0")
share = checked(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def yes_or_no(text: str) -> bool:
    """Parse True or False, as EDL's scripts take them."""
    if text.lower() not in {"true", "false", "1", "0", "yes", "no"}:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is True or False")
    return text.lower() in {"true", "1", "yes"}


def fixed_teachers(text: str) -> Fixed | None:
    """Parse host:port,…; empty is None, the teachers of the environment."""
    from edl_runtime.distill import Fixed
    from edl_runtime.errors import SpecError

    try:
        return Fixed.parse(text) if text else None
    except SpecError as error:
        raise argparse.ArgumentTypeError(f"got {error.given!r}, allowed is {error.allowed}") from None
