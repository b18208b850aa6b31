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
@click.option("--json", "as_json", is_flag=True, help="Print its last status as JSON.")
def stop(name: str, *, as_json: bool) -> None:
    """Stop and delete job or pool NAME, whoever started it. Its output is kept.

    All instances get SIGTERM at once, and SIGKILL after their grace period. Elastic trainers write a last checkpoint in
    that time; if they can't, the error is shown.

    Returns when its last process has ended. The Airflow task that runs it fails without a retry.
    """
    settings = RuntimeSettings.from_env(os.environ)
    status, errors, has_log = asyncio.run(_stop(backends.open_backend(settings), name))
    for error in errors:
        click.echo(error, err=True)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(status)))
    else:
        log = f"`edl logs {name}` shows its output" if has_log else "its output could not be kept"
        click.echo(f"{name} is stopped; {log}")


async def _stop(backend: Backend, name: str) -> tuple[JobStatus, list[str], bool]:
    """Return its last status, the errors of its agents, and whether its log is kept."""
    status = await backend.get(name)
    await backend.delete(name)
    try:
        last = {line.text async for line in backend.logs(name, tail=1)}
    except UnknownJobError:
        return status, [], False
    ended_here = status.elastic and not status.has_ended
    return status, sorted(line for line in last if ended_here and line.startswith("edl: ")), True
