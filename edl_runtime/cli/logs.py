"""`edl logs`: the output of a job's instances."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing, suppress

import click

from edl_runtime.backends.errors import ClusterUnavailableError
from edl_runtime.backends.interface import Backend
from edl_runtime.cli import backends
from edl_runtime.cli.completion import job_names
from edl_runtime.cli.options import print_json_line, read_settings

POLL_EVERY_S = 2.0
"""Seconds between two polls of the job's status."""

LAST_LINES_S = 3.0
"""How long the last lines of a permanently failed job may take to arrive."""


@click.command
@click.argument("name", shell_complete=job_names)
@click.option("--instance", type=click.IntRange(min=0), help="Only this instance's output.")
@click.option("--tail", type=click.IntRange(min=0), help="Only the last TAIL lines of each instance.")
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the job ends.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line, with instance and text.")
def logs(name: str, *, instance: int | None, tail: int | None, follow: bool, as_json: bool) -> None:
    """Show the output of job or pool NAME in its last run, also after it was deleted.

    Lines start with their instance's number in brackets unless --instance selects one. With --follow, problems of the
    job are printed to stderr.
    """

    async def show() -> None:
        async with aclosing(backend.logs(name, instance=instance, tail=tail, follow=follow)) as lines:
            async for line in lines:
                if as_json:
                    print_json_line(line)
                else:
                    click.echo(line.text if instance is not None else f"[{line.instance}] {line.text}")

    backend = backends.open_backend(read_settings())
    asyncio.run(_follow(show(), backend, name) if follow else show())


async def _follow(show: Coroutine[None, None, None], backend: Backend, name: str) -> None:
    """Show a log and the job's problems; end also when it has failed permanently, as its pods may never write."""
    showing = asyncio.create_task(show)
    watching = asyncio.create_task(_print_problems(backend, name))
    await asyncio.wait({showing, watching}, return_when=asyncio.FIRST_COMPLETED)
    has_failed = watching.done() and not watching.exception()
    await asyncio.wait({showing}, timeout=LAST_LINES_S if has_failed else None)
    for task in (watching, showing):
        task.cancel()
    shown, _ = await asyncio.gather(showing, watching, return_exceptions=True)
    if isinstance(shown, Exception):
        raise shown


async def _print_problems(backend: Backend, name: str) -> None:
    """Print each new problem of a job; return once it has failed for an invalid spec.

    Raises UnknownJobError and other errors of the backend.
    """
    printed = ""
    while True:
        with suppress(ClusterUnavailableError):  # the log retries, too
            status = await backend.get(name)
            if status.reason not in ("", printed):
                printed = status.reason
                click.echo(f"edl: {printed}", err=True)
            if status.has_ended and status.invalid_spec:
                return
        await asyncio.sleep(POLL_EVERY_S)
