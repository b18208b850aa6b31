"""`edl events`: what happened to a job's trainers."""

from __future__ import annotations

import asyncio
import contextlib
import os

import click
import msgspec

from edl_runtime.elastic.rendezvous.events import Event, follow, read
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect

DESERTED_S = 10.0
"""For so long nobody is there of a job that is gone; an instance that ended may be started again before."""


@click.command
@click.argument("job")
@click.option(
    "-f", "--follow", "goes_on", is_flag=True, help="Go on with what happens, until the job has ended or is gone."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def events(job: str, *, goes_on: bool, as_json: bool) -> None:
    """Show what happened to the trainers of JOB: time, generation, what, and the rest as the kind of event has it.

    A generation's line says which gear it is entered by and why; the line "resumed", how long training paused for it.

    Asks the Redis of EDL_REDIS_URL about the namespace EDL_NAMESPACE, which keeps events for a day.
    """
    settings = RuntimeSettings.from_env(os.environ)
    if not settings.redis_url:
        raise SpecError("EDL_REDIS_URL", "", "the Redis that the trainers register in, as redis://127.0.0.1:6379/0")

    def show(event: Event) -> None:
        click.echo(msgspec.json.encode(event) if as_json else event.line())

    async def show_all() -> None:
        async with connect(settings.redis_url) as client:
            happened = await read(client, settings.namespace, job)
            if not happened:
                waits = f"; waiting {DESERTED_S:g} s for a job of that name" if goes_on else ""
                click.echo(f"edl: nothing happened to trainers of {job!r} within a day of now{waits}", err=True)
            if goes_on:
                began_at = max((event.at for event in happened if event.kind == "registered"), default=0.0)
                told = follow(client, settings.namespace, job, deserted_s=DESERTED_S)
                async with contextlib.aclosing(told) as happening:
                    async for event in happening:
                        show(event)
                        if event.kind == "ended" and event.at >= began_at:  # not an earlier run of that name
                            return
                click.echo(f"edl: no trainers of {job!r} are registered, and it has not ended", err=True)
                return
            for event in happened:
                show(event)

    asyncio.run(show_all())
