"""`edl resize`: change the number of instances."""

from __future__ import annotations

import asyncio
import os

import click
import msgspec

from edl_runtime.cli import backends
from edl_runtime.settings import RuntimeSettings


@click.command(context_settings={"ignore_unknown_options": True})  # -1 is an invalid number, not an option
@click.argument("name")
@click.argument("instances", type=int)
@click.option("--json", "as_json", is_flag=True, help="Print the job's status as JSON.")
def resize(name: str, instances: int, *, as_json: bool) -> None:
    """Resize job or pool NAME to so many INSTANCES, within its bounds; 0 suspends it.

    A suspended job continues when it is resized again: elastic trainers from the checkpoint that they wrote when they
    were suspended, others from the beginning.

    Returns when the request is recorded; the instance with the highest number leaves first.
    """
    settings = RuntimeSettings.from_env(os.environ)
    status = asyncio.run(backends.open_backend(settings).resize(name, instances))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(status)))
    elif status.is_suspended:
        click.echo(f"{status.name} is suspended; `edl resize {status.name} N` or a rescaling resumes it")
    else:
        click.echo(f"{status.name} will have {status.wanted} instance{'' if status.wanted == 1 else 's'}")
