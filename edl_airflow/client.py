"""Client for an `edl` connection: its backend, which runs jobs, and its Redis, which holds their state."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from edl_airflow.backends import watching_backend
from edl_airflow.hooks.edl import EdlConnection
from edl_airflow.results import CheckpointResult
from edl_airflow.runtime.spec import (
    LogPosition,
    TrainingStatus,
)
from edl_runtime import progress
from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import Backend, JobStatus
from edl_runtime.concurrency import SharedInLoop
from edl_runtime.progress import Progress
from edl_runtime.registry.errors import other_pools
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect, decode_record, unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from edl_runtime.autoscale.history import RescaleOutcome
    from edl_runtime.autoscale.planner import RescalingRules
    from edl_runtime.autoscale.policy.interface import Policy
    from edl_runtime.checkpoint.checkpoint_events import SavedCheckpoint
    from edl_runtime.pool_reports import PoolDemand
    from edl_runtime.registry.members import Member
    from edl_runtime.store.keys import Role

REDIS_CONNECTIONS = 64
"""How many connections to a Redis the clients of one event loop share: a triggerer follows hundreds of tasks."""

LOG_POSITION_TTL_S = 24 * 3600
"""How long the position in a job's log is kept after the last line."""

STARTED_BY_TTL_S = 30 * 24 * 3600
"""How long it is kept which try has started a job: longer than a training takes."""


_shared_redis: SharedInLoop[Redis] = SharedInLoop(
    lambda url: connect(url, connections=REDIS_CONNECTIONS), lambda redis: redis.aclose()
)
"""The client of each Redis."""


@asynccontextmanager
async def open_client(edl_connection: EdlConnection, *, waits: bool = False) -> AsyncIterator[EdlClient]:
    """Open a client, and close its sockets on exit, unless others of this event loop still use them.

    Sends nothing to Redis yet, so work that needs only the backend continues while Redis is away. `waits`: it has a
    connection to Redis of its own, because its commands block there.
    """
    async with watching_backend(edl_connection.place) as backend:
        await asyncio.to_thread(import_module, "redis.asyncio")  # it would block the event loop for a second
        redis_of = connect if waits else _shared_redis.use
        async with redis_of(edl_connection.redis_url) as redis:
            yield await asyncio.to_thread(EdlClient, edl_connection, backend, redis)


class EdlClient:
    """The `backend`, the `secrets` for its instances, and the state in Redis. Made by `open_client`.

    Every method raises RegistryUnavailableError.
    """

    def __init__(self, edl_connection: EdlConnection, backend: Backend, client: Redis) -> None:
        from edl_runtime.checkpoint import checkpoint_events
        from edl_runtime.elastic.rendezvous import group_status, redis_store, requests
        from edl_runtime.registry import directory, pools

        self.namespace = edl_connection.namespace
        self.secrets = edl_connection.secrets(os.environ)
        self.backend = backend
        self._client = client
        self._checkpoints, self._rendezvous = checkpoint_events, redis_store
        self._group_status, self._requests = group_status, requests
        self._directory, self._pools = directory, pools

    @property
    def redis(self) -> Redis:
        """For functions of the runtime that take it, as those that show a job's curve."""
        return self._client

    async def teachers(self, pool: str) -> list[str]:
        """Return the addresses of the registered teachers, sorted."""
        return sorted(member.address for member in await self.members(pool, "teachers"))

    async def other_pools(self, pool: str) -> str:
        """Return which other pools are known, in words; empty if this one is known, too."""
        known = await self._directory.Directory(self._client, self.namespace).known_pools()
        return "" if pool in known else other_pools(pool, self.namespace, known)

    async def members(self, pool: str, role: Role) -> list[Member]:
        """Return the registered teachers or students, by id."""
        return await self._directory.Directory(self._client, self.namespace).members(pool, role)

    async def demand(self, pool: str) -> PoolDemand:
        """Return the pool's last reports of teachers and students."""
        return (await self._pools.read_demands(self._client, self.namespace, [pool]))[pool]

    async def progress(self, job: str) -> Progress | None:
        """Return the job's last report."""
        return await progress.read_progress(self._client, self.namespace, job)

    async def checkpoint(self, stream: str, job: str, since: float) -> CheckpointResult | None:
        """Return the job's newest checkpoint in the stream that was complete at `since` or later."""
        found = await self._checkpoints.newest(self._client, self.namespace, stream, job=job, since=since)
        return to_checkpoint_result(found) if found else None

    async def next_checkpoints(
        self, stream: str, last_id: str, *, block_ms: int = 1000
    ) -> list[tuple[str, CheckpointResult | None]]:
        """Return checkpoints after `last_id` (empty: from the start) with their ids; wait up to `block_ms` for one.

        None stands for an entry that can't be read.
        """
        last_id = last_id or self._checkpoints.START
        found = await self._checkpoints.after(self._client, self.namespace, stream, last_id, block_ms=block_ms)
        return [(entry_id, to_checkpoint_result(one) if one else None) for entry_id, one in found]

    async def end_of_checkpoints(self, stream: str) -> str:
        """Return the id of the last checkpoint in the stream."""
        return await self._checkpoints.end(self._client, self.namespace, stream)

    async def training(self, job: str) -> TrainingStatus | None:
        """Return the state that the job's agents have agreed on, None if there are none."""
        found = await self._group_status.group_status(self._client, self.namespace, job)
        if not found:
            return None
        outcome = found.outcome
        return TrainingStatus(
            members=found.members,
            ended=outcome.kind if outcome else "",
            reason=outcome.reason if outcome else "",
            heard_at=found.heard_at,
        )

    async def generations(self, job: str) -> int:
        """Return how many generations of trainers the job has had."""
        happened = await self._rendezvous.read_events(self._client, self.namespace, job)
        return len({event.generation for event in happened if event.kind == "active"})

    async def request_stop(self, job: str, reason: str) -> bool:
        """Ask a job's trainers to end with a checkpoint; False when there are none yet. The first reason counts."""
        return await self._requests.request_stop(self._client, self.namespace, job, reason)

    async def rescale(self, rules: RescalingRules, *, dry_run: bool, policy: Policy) -> RescaleOutcome:
        """Make one pass over all jobs and pools; see `edl_runtime.autoscale.rescale`."""
        from edl_runtime.autoscale.rescale import rescale

        return await rescale(self.backend, self._client, self.namespace, rules, dry_run=dry_run, policy=policy)

    async def started_by(self, job: str) -> str:
        """Return the token of the try that has started the job last, empty for none."""
        key = keys.started_by(self.namespace, job)
        with unavailable_if_lost(self._client, key):
            token = await self._client.get(key)
        return str(token or "")

    async def save_started_by(self, job: str, token: str) -> None:
        with unavailable_if_lost(self._client):
            await self._client.set(keys.started_by(self.namespace, job), token, ex=STARTED_BY_TTL_S)

    async def log_position(self, job: str) -> LogPosition | None:
        """Return how much of the job's log the task's log has already, None if that is not known."""
        key = keys.log_position(self.namespace, job)
        with unavailable_if_lost(self._client, key):
            kept = await self._client.get(key)
        return decode_record(kept, LogPosition)

    async def save_log_position(self, job: str, position: LogPosition) -> None:
        with unavailable_if_lost(self._client):
            await self._client.set(
                keys.log_position(self.namespace, job), msgspec.json.encode(position), ex=LOG_POSITION_TTL_S
            )


def to_checkpoint_result(found: SavedCheckpoint) -> CheckpointResult:
    """Return a saved checkpoint in the form of tasks' results."""
    return CheckpointResult(
        job=found.job, checkpoint=found.url, step=found.step, epoch=found.epoch, metrics=found.metrics, at=found.at
    )


async def job_status(backend: Backend, name: str) -> JobStatus | None:
    """Return the status of the job or pool, None if the backend has none of that name."""
    try:
        return await backend.get(name)
    except UnknownJobError:
        return None
