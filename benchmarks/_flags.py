"""Flags that several benchmarks have."""

from __future__ import annotations

import argparse


def at_least_1(text: str) -> int:
    """Return the whole number in a flag. Raises what argparse shows."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed is 1 or more")
    return number
