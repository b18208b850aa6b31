"""`edl logs`: what a job's instances wrote."""

from __future__ import annotations

import asyncio
import os

import click
import msgspec

from edl_runtime.cli import places
from edl_runtime.settings import RuntimeSettings


@click.command
@click.argument("name")
@click.option("--instance", type=click.IntRange(min=0), help="Only this instance's output.")
@click.option("--tail", type=click.IntRange(min=0), help="Only the last TAIL lines of each instance.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what they write until the job ends.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line, with instance and text.")
def logs(name: str, *, instance: int | None, tail: int | None, follow: bool, as_json: bool) -> None:
    """Show what the instances of job or pool NAME wrote in its last run, also after it was deleted.

    Lines start with their instance's number in brackets unless --instance chooses one.
    """
    settings = RuntimeSettings.from_env(os.environ)

    async def show() -> None:
        backend = places.backend(settings)
        async for line in backend.logs(name, instance=instance, tail=tail, follow=follow):
            if as_json:
                click.echo(msgspec.json.encode(line))
            else:
                click.echo(line.text if instance is not None else f"[{line.instance}] {line.text}")

    asyncio.run(show())
