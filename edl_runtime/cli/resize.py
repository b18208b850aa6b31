"""`edl resize`: change the number of instances."""

from __future__ import annotations

import asyncio
import os

import click
import msgspec

from edl_runtime.cli import places
from edl_runtime.settings import RuntimeSettings


@click.command(context_settings={"ignore_unknown_options": True})  # -1 is a number to refuse, no option
@click.argument("name")
@click.argument("instances", type=int)
@click.option("--json", "as_json", is_flag=True, help="Print the job's status as JSON.")
def resize(name: str, instances: int, *, as_json: bool) -> None:
    """Give job or pool NAME that many INSTANCES, within its bounds.

    Returns when the wish is recorded; the instance with the highest number leaves first.
    """
    settings = RuntimeSettings.from_env(os.environ)
    status = asyncio.run(places.backend(settings).resize(name, instances))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(status)))
    else:
        click.echo(f"{name} will have {status.wanted} instance{'' if status.wanted == 1 else 's'}")
