"""`edl drain`: take a teacher out of its pool."""

from __future__ import annotations

import asyncio

import click

from edl_runtime.cli.completion import pool_names
from edl_runtime.cli.options import print_json, read_settings
from edl_runtime.registry.drain import drain as drain_teacher
from edl_runtime.registry.drain import undo_drain
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect


@click.command
@click.argument("pool", shell_complete=pool_names)
@click.argument("teacher")
@click.option("--undo", is_flag=True, help="Let a drained server of `edl register` join its pool again.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def drain(pool: str, teacher: str, *, undo: bool, as_json: bool) -> None:
    """Take TEACHER, by its id or address in `edl pools POOL`, out of POOL.

    It leaves the pool at once, so that students send it no more requests. It answers those in flight for up to 8 s, and
    ends with exit status 75. A pool of a backend keeps its size: another process takes its place, on Kubernetes in the
    same pod. To have fewer teachers, resize the pool.

    A server that is not ours runs on and stays out of the pool until --undo, or until its `edl register` is started
    again.

    Uses the Redis of EDL_REDIS_URL and the namespace EDL_NAMESPACE.
    """
    asyncio.run(_drain(read_settings(redis="the Redis that the pool registers in"), pool, teacher, undo=undo))
    if as_json:
        print_json({"pool": pool, "teacher": teacher, "drained": not undo})
    elif undo:
        click.echo(f"{teacher} may join pool {pool} again")
    else:
        click.echo(f"{teacher} has left pool {pool}; it answers what is in flight")


async def _drain(settings: RuntimeSettings, pool: str, teacher: str, *, undo: bool) -> None:
    async with connect(settings.redis_url) as client:
        await (undo_drain if undo else drain_teacher)(client, settings.namespace, pool, teacher)
