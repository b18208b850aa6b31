"""`edl logs`: what a job's instances wrote."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from contextlib import aclosing, suppress

import click
import msgspec

from edl_runtime.backends.errors import ClusterUnavailableError
from edl_runtime.backends.interface import Backend
from edl_runtime.cli import backends
from edl_runtime.settings import RuntimeSettings

LOOK_EVERY_S = 2.0
"""Seconds between two looks at why nothing is written."""

LAST_WORDS_S = 3.0
"""How long the end of the log of a job that has failed for what it was given may take to come."""


@click.command
@click.argument("name")
@click.option("--instance", type=click.IntRange(min=0), help="Only this instance's output.")
@click.option("--tail", type=click.IntRange(min=0), help="Only the last TAIL lines of each instance.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what they write until the job ends.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line, with instance and text.")
def logs(name: str, *, instance: int | None, tail: int | None, follow: bool, as_json: bool) -> None:
    """Show what the instances of job or pool NAME wrote in its last run, also after it was deleted.

    Lines start with their instance's number in brackets unless --instance chooses one. While --follow waits, stderr has
    what is wrong with the job.
    """
    settings = RuntimeSettings.from_env(os.environ)

    async def show() -> None:
        async with aclosing(backend.logs(name, instance=instance, tail=tail, follow=follow)) as lines:
            async for line in lines:
                if as_json:
                    click.echo(msgspec.json.encode(line))
                else:
                    click.echo(line.text if instance is not None else f"[{line.instance}] {line.text}")

    backend = backends.open_backend(settings)
    asyncio.run(_until_hopeless(show(), backend, name) if follow else show())


async def _until_hopeless(show: Coroutine[None, None, None], backend: Backend, name: str) -> None:
    """Show a log and say what is wrong meanwhile; end when the job has failed and its pods will never write."""
    showing = asyncio.create_task(show)
    telling = asyncio.create_task(_tell_troubles(backend, name))
    await asyncio.wait({showing, telling}, return_when=asyncio.FIRST_COMPLETED)
    is_hopeless = telling.done() and not telling.exception()
    await asyncio.wait({showing}, timeout=LAST_WORDS_S if is_hopeless else None)
    for task in (telling, showing):
        task.cancel()
    shown, _ = await asyncio.gather(showing, telling, return_exceptions=True)
    if isinstance(shown, Exception):
        raise shown


async def _tell_troubles(backend: Backend, name: str) -> None:
    """Say what is wrong with a job, each time that it is something else, until what it was given has failed it.

    Raises UnknownJobError and what else the backend raises, as the job's log does.
    """
    told = ""
    while True:
        with suppress(ClusterUnavailableError):  # the log rides it out as well
            status = await backend.get(name)
            if status.reason not in ("", told):
                told = status.reason
                click.echo(f"edl: {told}", err=True)
            if status.has_ended and status.invalid_spec:
                return
        await asyncio.sleep(LOOK_EVERY_S)
