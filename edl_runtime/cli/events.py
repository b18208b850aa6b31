"""`edl events`: what happened to a job's trainers."""

from __future__ import annotations

import asyncio
import contextlib

import click
import msgspec

from edl_runtime.cli.completion import job_names
from edl_runtime.cli.options import read_settings
from edl_runtime.elastic.rendezvous.redis_store import Event, follow_events, read_events
from edl_runtime.store.redis_client import connect

DESERTED_S = 10.0
"""How long no trainer is registered before the job counts as gone; a restarted instance is back sooner."""


@click.command
@click.argument("job", shell_complete=job_names)
@click.option("-f", "--follow", "follows", is_flag=True, help="Follow events until the job has ended or is gone.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def events(job: str, *, follows: bool, as_json: bool) -> None:
    """Show the events of JOB's trainers: time, generation, kind and details.

    The line of a generation has its gear and reason; the line "resumed", how long training was paused.

    Uses the Redis of EDL_REDIS_URL and the namespace EDL_NAMESPACE. Events are kept for a day.
    """
    settings = read_settings(redis="the Redis that the trainers register in")

    def show(event: Event) -> None:
        click.echo(msgspec.json.encode(event) if as_json else event.line())

    async def show_all() -> None:
        async with connect(settings.redis_url) as client:
            happened = await read_events(client, settings.namespace, job)
            if not happened:
                waits = f"; waiting {DESERTED_S:g} s for a job of that name" if follows else ""
                click.echo(f"edl: no events of {job!r} within the last day{waits}", err=True)
            if follows:
                began_at = max((event.at for event in happened if event.kind == "registered"), default=0.0)
                followed = follow_events(client, settings.namespace, job, deserted_s=DESERTED_S)
                async with contextlib.aclosing(followed) as stream:
                    async for event in stream:
                        show(event)
                        if event.kind == "ended" and event.at >= began_at:  # not an earlier run of that name
                            return
                click.echo(f"edl: no trainers of {job!r} are registered, and it has not ended", err=True)
                return
            for event in happened:
                show(event)

    asyncio.run(show_all())
