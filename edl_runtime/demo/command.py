"""How the demo's commands log, and how they exit for errors."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from edl_runtime.demo.errors import PERMANENT, PodFailedError
from edl_runtime.errors import EX_CONFIG, EdlError, SpecError

log_level_option = click.option(
    "--log_level", type=click.IntRange(0, 50), default=20, show_default=True, help="As Python's: 10 is DEBUG, 20 INFO."
)


def make_log_dir(folder: Path) -> None:
    """Make the folder of logs. Raises SpecError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError("--log_dir", str(folder), f"a folder that can be made ({error.strerror})") from None


def run_command(command: click.Command) -> None:
    """Run a command with this process's arguments and exit; see the `edl` command for the exit statuses."""
    try:
        command()
    except EdlError as error:
        click.echo(f"edl: {error}", err=True)
        if isinstance(error, PodFailedError) and error.exit_code in PERMANENT:
            sys.exit(error.exit_code)
        sys.exit(EX_CONFIG if isinstance(error, SpecError) else 1)
