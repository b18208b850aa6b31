"""What the commands that start a job share."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import click

from edl_runtime.backends.base import Backend
from edl_runtime.errors import JobRunsError, UnknownJobError
from edl_runtime.store import eviction

if TYPE_CHECKING:
    from redis.asyncio import Redis

priority_option = click.option(
    "--priority", type=int, default=0, show_default=True, help="Where not all jobs fit, a higher one is first."
)
weight_option = click.option(
    "--weight",
    type=float,
    default=1.0,
    show_default=True,
    help="Of 2, about twice what one of 1 gets beyond its least.",
)


async def warn_of_eviction(client: Redis) -> None:
    """Say what is to be set in a Redis that may delete what a job needs. Raises RegistryUnavailableError."""
    if warning := await eviction.warning(client):
        click.echo(f"edl: warning: {warning}", err=True)


async def make_way(backend: Backend, name: str) -> None:
    """Forget an ended job of that name: who starts one again means it, also when it has succeeded before.

    Raises JobRunsError for one that has not ended.
    """
    try:
        status = await backend.get(name)
    except UnknownJobError:
        return
    if not status.has_ended:
        raise JobRunsError(name, datetime.fromtimestamp(status.created_at).astimezone(), status.cwd)
    await backend.delete(name, token=status.token)
