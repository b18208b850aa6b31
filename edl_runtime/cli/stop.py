"""`edl stop`: end a job or pool by hand."""

from __future__ import annotations

import asyncio
import os

import click
import msgspec

from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import Backend, JobStatus
from edl_runtime.cli import backends
from edl_runtime.settings import RuntimeSettings


@click.command
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the status that it had, as JSON.")
def stop(name: str, *, as_json: bool) -> None:
    """Stop job or pool NAME, whoever started it, and forget it; what it wrote is kept.

    All instances get SIGTERM at once, and SIGKILL after their grace. Elastic trainers write a last checkpoint in it; if
    they can't, it is said here.

    Returns when its last process is gone. The Airflow task that runs it fails, without a retry.
    """
    settings = RuntimeSettings.from_env(os.environ)
    status, last_words, has_log = asyncio.run(_stop(backends.open_backend(settings), name))
    for words in last_words:
        click.echo(words, err=True)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(status)))
    else:
        log = f"`edl logs {name}` shows what it wrote" if has_log else "what it wrote could not be kept"
        click.echo(f"{name} is gone; {log}")


async def _stop(backend: Backend, name: str) -> tuple[JobStatus, list[str], bool]:
    """Return the status that it had, what agents of trainers said if they ended badly, and whether its log is kept."""
    status = await backend.get(name)
    await backend.delete(name)
    try:
        last = {line.text async for line in backend.logs(name, tail=1)}
    except UnknownJobError:
        return status, [], False
    ended_here = status.elastic and not status.has_ended
    return status, sorted(line for line in last if ended_here and line.startswith("edl: ")), True
