"""`edl resize`: change the number of instances."""

from __future__ import annotations

import asyncio
import os

import click
import msgspec

from edl_runtime.backends.interface import JobStatus
from edl_runtime.cli import backends
from edl_runtime.settings import RuntimeSettings


@click.command(context_settings={"ignore_unknown_options": True})  # -1 is a number to refuse, no option
@click.argument("name")
@click.argument("instances", type=int)
@click.option("--json", "as_json", is_flag=True, help="Print the job's status as JSON.")
def resize(name: str, instances: int, *, as_json: bool) -> None:
    """Give job or pool NAME that many INSTANCES, within its bounds; or 0, which suspends it.

    One that is suspended goes on when it is given instances again: elastic trainers from the checkpoint that they
    wrote before they left, and others from the beginning.

    Returns when the wish is recorded; the instance with the highest number leaves first.
    """
    settings = RuntimeSettings.from_env(os.environ)
    status = asyncio.run(backends.open_backend(settings).resize(name, instances))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(status)))
    else:
        click.echo(_told(status))


def _told(status: JobStatus) -> str:
    if status.is_suspended:
        return f"{status.name} is suspended; `edl resize {status.name} N` lets it go on, as a rescaling does"
    return f"{status.name} will have {status.wanted} instance{'' if status.wanted == 1 else 's'}"
