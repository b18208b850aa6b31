"""Names that a shell completes: of jobs and pools that are there now. Says nothing if it can't find out in time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable

import click

from edl_runtime.settings import RuntimeSettings

LIMIT_S = 2.0
"""How long a person waits for names after a tab."""

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def _completer(read: Callable[[RuntimeSettings], Awaitable[Iterable[str]]]) -> Completer:
    def complete(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:  # noqa: ARG001 - click's
        async def names() -> Iterable[str]:
            async with asyncio.timeout(LIMIT_S):
                return await read(RuntimeSettings.from_env(os.environ))

        try:
            return sorted(name for name in asyncio.run(names()) if name.startswith(begun))
        except Exception:  # noqa: BLE001 - a message would stand in the middle of the line that a person types
            return []

    return complete


async def _jobs(settings: RuntimeSettings) -> Iterable[str]:
    from edl_runtime.cli.backends import open_backend

    return [status.name for status in await open_backend(settings).list()]


async def _pools(settings: RuntimeSettings) -> Iterable[str]:
    from edl_runtime.registry.directory import Directory
    from edl_runtime.store.redis_client import connect

    async with connect(settings.redis_url) as client:
        return await Directory(client, settings.namespace).members_of_pools()


job_names = _completer(_jobs)
pool_names = _completer(_pools)
