"""What a connection leads to: a backend that runs jobs, and a Redis that knows who is alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from edl_airflow.hooks.edl import Surroundings
from edl_airflow.work import Place

if TYPE_CHECKING:
    from edl_runtime.backends.base import Backend
    from edl_runtime.progress import Progress
    from edl_runtime.registry.members import Member
    from edl_runtime.store.keys import Role


def backend_at(place: Place) -> Backend:
    """Return the backend: all that is needed to stop a job, without Redis and without a connection."""
    from edl_runtime.backends.local import LocalBackend

    return LocalBackend(place.work_dir)


@asynccontextmanager
async def open_site(surroundings: Surroundings) -> AsyncIterator[Site]:
    """Open what a connection leads to, and close its sockets on exit. Raises nothing for a Redis that is away.

    Nothing is sent to Redis yet, so work that needs only the backend goes on while Redis is away.
    """
    site = await asyncio.to_thread(Site, surroundings)  # imports Redis's client, which takes a second
    try:
        yield site
    finally:
        await site.close()


class Site:
    """Where instances run (`backend`), what they may know (`secrets`) and who is alive. Made by `open_site`."""

    def __init__(self, surroundings: Surroundings) -> None:
        from edl_runtime import progress
        from edl_runtime.registry.directory import Directory
        from edl_runtime.store.client import connect

        self.namespace = surroundings.namespace
        self.secrets = {"EDL_REDIS_URL": surroundings.redis_url}
        self.backend: Backend = backend_at(surroundings.place)
        self._client = connect(surroundings.redis_url)
        self._directory = Directory(self._client, surroundings.namespace)
        self._read_progress = progress.read

    async def close(self) -> None:
        """Close the sockets."""
        await self._client.aclose()

    async def teachers(self, pool: str) -> list[str]:
        """Return the addresses of the registered teachers, sorted. Raises RegistryUnavailableError."""
        return sorted(member.address for member in await self.members(pool, "teachers"))

    async def members(self, pool: str, role: Role) -> list[Member]:
        """Return the registered teachers or students, by id. Raises RegistryUnavailableError."""
        return await self._directory.members(pool, role)

    async def progress(self, job: str) -> Progress | None:
        """Return the job's last report. Raises RegistryUnavailableError."""
        return await self._read_progress(self._client, self.namespace, job)
