"""`edl stop`: end a job or pool by hand."""

from __future__ import annotations

import asyncio
import os

import click
import msgspec

from edl_runtime.backends.base import JobStatus
from edl_runtime.backends.local import LocalBackend
from edl_runtime.settings import RuntimeSettings


@click.command
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the status that it had, as JSON.")
def stop(name: str, *, as_json: bool) -> None:
    """Stop job or pool NAME, whoever started it, and forget it; what it wrote is kept.

    Returns when its last process is gone. A task that still waits for it fails.
    """
    settings = RuntimeSettings.from_env(os.environ)
    status = asyncio.run(_stop(LocalBackend(settings.work_dir), name))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(status)))
    else:
        click.echo(f"{name} is gone; `edl logs {name}` shows what it wrote")


async def _stop(backend: LocalBackend, name: str) -> JobStatus:
    status = await backend.get(name)
    await backend.delete(name)
    return status
