"""What several commands share: settings, options, and output as tables and JSON."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import click
import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.log import log_to_stderr
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


def read_settings(*, redis: str = "") -> RuntimeSettings:
    """Return the settings in the environment, and log to stderr.

    `redis` is the purpose of a Redis that the command can't do without. Raises SpecError.
    """
    log_to_stderr()
    settings = RuntimeSettings.from_env(os.environ)
    if redis and not settings.redis_url:
        raise SpecError("EDL_REDIS_URL", "", f"{redis}, as redis://127.0.0.1:6379/0")
    return settings


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write that finds no room: on the disk, in the quota, or below the limit of a file's size."""


def tell(line: str | bytes, *, err: bool = False) -> None:
    """Print a line of a command that goes on when a full disk can't take it. Raises OSError for another failure."""
    try:
        click.echo(line, err=err)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise


def tell_json_line(value: Any) -> None:
    """Print JSON on one line, as `tell` does."""
    tell(msgspec.json.encode(value))


def print_json(value: Any) -> None:
    """Print indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value)))


def print_json_line(value: Any) -> None:
    """Print JSON on one line."""
    click.echo(msgspec.json.encode(value))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. Columns are never cut, so that names can be copied."""
    from rich.cells import cell_len

    lines = [line for row in (headings, *rows) for line in zip_longest(*map(str.splitlines, row), fillvalue="")]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for number, line in enumerate(lines):
        cells = [cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True)]
        click.secho("  ".join(cells), bold=number == 0)
