"""Options and tables that several commands share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import click

from edl_runtime.errors import SpecError

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""Seconds of what times are told in."""


def split_list(text: str) -> tuple[str, ...]:
    """Return what a flag lists, as in a,b."""
    return tuple(word for word in text.split(",") if word)


def parse_gpu_ids(text: str) -> tuple[int, ...]:
    """Return the GPUs in `--gpu-ids`; empty is the CPU. Raises SpecError."""
    if not all(word.isdecimal() for word in split_list(text)):
        raise SpecError("gpu_ids", text, "numbers, as in 0,1")
    return tuple(map(int, split_list(text)))


def parse_duration(flag: str, text: str) -> float:
    """Return a time above 0 as in 30s, 90m, 6h or 7d. Raises SpecError that names the flag."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd])", text)
    if not found or not float(found[1]):
        raise SpecError(flag, text, "a time above 0, as in 30s, 90m, 6h or 7d")
    return float(found[1]) * UNITS_S[found[2]]


priority_option = click.option(
    "--priority", type=int, default=0, show_default=True, help="Where not all jobs fit, a higher one is first."
)

weight_option = click.option(
    "--weight",
    type=float,
    default=1.0,
    show_default=True,
    help="Of 2, about twice what one of 1 gets beyond its least.",
)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below their headings, each column as wide as it needs: names are there to be copied whole."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    console.width = Console(width=2**16).measure(table).maximum
    console.print(table)
