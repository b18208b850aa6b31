"""Options and tables that several commands share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import click

from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""Seconds of the units of `parse_duration`."""


def split_list(text: str) -> tuple[str, ...]:
    """Return the words of a list as in a,b."""
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
    "--priority", type=int, default=0, show_default=True, help="Jobs of higher priority come first."
)

weight_option = click.option(
    "--weight",
    type=float,
    default=1.0,
    show_default=True,
    help="Share of instances above the minimum, relative to other jobs.",
)


def require_redis(settings: RuntimeSettings, purpose: str) -> str:
    """Return the URL of Redis. Raises SpecError where EDL_REDIS_URL is not set."""
    if not settings.redis_url:
        raise SpecError("EDL_REDIS_URL", "", f"{purpose}, as redis://127.0.0.1:6379/0")
    return settings.redis_url


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. Columns are never cut, so that names can be copied."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    console.width = Console(width=2**16).measure(table).maximum
    console.print(table)
