"""Client of what an `edl` connection leads to: a backend that runs jobs, and the Redis with who is alive."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from edl_airflow.connection import EdlConnection
from edl_airflow.results import CheckpointResult
from edl_airflow.runtime.spec import (
    BackendRef,
    KubernetesBackendRef,
    LocalBackendRef,
    LogPosition,
    TrainingStatus,
)
from edl_runtime import progress
from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import Backend, JobStatus
from edl_runtime.errors import SpecError
from edl_runtime.progress import Progress
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect, decode_record, unavailable_if_lost

if TYPE_CHECKING:
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
    from kubernetes_asyncio.client import ApiClient

    from edl_runtime.autoscale.planner import RescalingPlan, RescalingRules
    from edl_runtime.autoscale.policy.wrappers import Policy
    from edl_runtime.autoscale.rescale import RescaleOutcome
    from edl_runtime.backends.interface import Backend
    from edl_runtime.backends.kubernetes.backend import KubernetesBackend
    from edl_runtime.checkpoint.checkpoint_events import SavedCheckpoint
    from edl_runtime.pool_reports import PoolDemand
    from edl_runtime.progress import Progress
    from edl_runtime.registry.members import Member
    from edl_runtime.store.keys import Role

_hooks: dict[str, AsyncKubernetesHook] = {}
"""A hook keeps what it has looked up: `on_kill`, in the middle of anything, may ask nothing of Airflow."""


def cluster_client_factory(conn_id: str) -> Callable[[], AbstractAsyncContextManager[ApiClient]]:
    """Return what opens a client of the cluster that a connection of type `kubernetes` leads to.

    Empty for that of the pod that this runs in. What the connection says is looked up when the first client is opened,
    and again after `forget_cluster_connection`. Opening raises SpecError for a connection that leads nowhere, and
    Airflow's AirflowNotFoundException for one that does not exist.
    """

    @asynccontextmanager
    async def connect() -> AsyncIterator[ApiClient]:
        from kubernetes_asyncio.config import ConfigException

        hook = _hooks.get(conn_id) or _hooks.setdefault(conn_id, _kubernetes_hook(conn_id))
        try:
            opened = hook.get_conn()
            client = await opened.__aenter__()
        except (ConfigException, OSError) as error:
            where = f"connection {conn_id!r}" if conn_id else "in-cluster credentials"
            raise SpecError(where, str(error), "what leads to a cluster, as for KubernetesPodOperator") from error
        try:
            yield client
        finally:
            await opened.__aexit__(None, None, None)

    return connect


def forget_cluster_connection(conn_id: str) -> None:
    """Look the connection up anew when it is next opened."""
    _hooks.pop(conn_id, None)


def _kubernetes_hook(conn_id: str) -> AsyncKubernetesHook:
    try:
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import AsyncKubernetesHook
    except ImportError:
        allowed = "what the extra edl-airflow[airflow-kubernetes,kubernetes] brings along"
        raise SpecError("backend 'kubernetes'", "no provider for Kubernetes", allowed) from None
    return AsyncKubernetesHook(kubernetes_conn_id=conn_id or None, in_cluster=None if conn_id else True)


# What a connection leads to: a backend that runs jobs, and a Redis that knows who is alive.


_kubernetes_backends: dict[bytes, KubernetesBackend] = {}

LOG_POSITION_TTL_S = 24 * 3600
"""How long it is known how much of a job's log has been shown, after the last that was."""

STARTED_BY_TTL_S = 30 * 24 * 3600
"""How long it is known which try has started a job: longer than one trains."""


def backend_for(place: BackendRef) -> Backend:
    """Return the backend: all that is needed to stop a job, without Redis and without the `edl` connection."""
    if isinstance(place, LocalBackendRef):
        from edl_runtime.backends.local.backend import LocalBackend

        return LocalBackend(place.work_dir)
    return _kubernetes_backend(place)


def _kubernetes_backend(place: KubernetesBackendRef) -> KubernetesBackend:
    """Return the one backend of that place: all tasks of a triggerer share what it watches."""
    from edl_runtime.backends.kubernetes.backend import KubernetesBackend

    made = KubernetesBackend(cluster_client_factory(place.conn_id), namespace=place.namespace, defaults=place.pod)
    return _kubernetes_backends.setdefault(msgspec.json.encode(place), made)


@asynccontextmanager
async def _watching_backend(place: BackendRef) -> AsyncIterator[Backend]:
    """Open a backend that is asked often, without asking a cluster as often."""
    if isinstance(place, LocalBackendRef):
        yield await asyncio.to_thread(backend_for, place)
        return

    forget_cluster_connection(place.conn_id)  # what it says may have been edited since
    pods = await asyncio.to_thread(_kubernetes_backend, place)
    async with pods.following() as followed:
        yield followed


@asynccontextmanager
async def open_client(edl_connection: EdlConnection) -> AsyncIterator[EdlClient]:
    """Open what a connection leads to, and close its sockets on exit. Raises nothing for a Redis that is away.

    Nothing is sent to Redis yet, so work that needs only the backend goes on while Redis is away.
    """
    async with _watching_backend(edl_connection.place) as backend:
        client = await asyncio.to_thread(
            EdlClient, edl_connection, backend
        )  # imports Redis's client, which takes a second
        try:
            yield client
        finally:
            await client.close()


class EdlClient:
    """Where instances run (`backend`), what they may know (`secrets`) and who is alive. Made by `open_client`.

    All that asks Redis raises RegistryUnavailableError.
    """

    def __init__(self, edl_connection: EdlConnection, backend: Backend) -> None:
        from edl_runtime.checkpoint import checkpoint_events
        from edl_runtime.elastic.rendezvous import events, redis_store
        from edl_runtime.registry.directory import Directory
        from edl_runtime.registry.pools import read_demands

        self.namespace = edl_connection.namespace
        self.secrets = edl_connection.secrets(os.environ)
        self.backend = backend
        self._client = connect(edl_connection.redis_url)
        self._directory = Directory(self._client, edl_connection.namespace)
        self._demands = read_demands
        self._landed, self._events, self._membership = checkpoint_events, events, redis_store

    async def close(self) -> None:
        """Close the sockets."""
        await self._client.aclose()

    async def teachers(self, pool: str) -> list[str]:
        """Return the addresses of the registered teachers, sorted."""
        return sorted(member.address for member in await self.members(pool, "teachers"))

    async def members(self, pool: str, role: Role) -> list[Member]:
        """Return the registered teachers or students, by id."""
        return await self._directory.members(pool, role)

    async def demand(self, pool: str) -> PoolDemand:
        """Return what the pool's teachers and students report."""
        return (await self._demands(self._client, self.namespace, [pool]))[pool]

    async def progress(self, job: str) -> Progress | None:
        """Return the job's last report."""
        return await progress.read_progress(self._client, self.namespace, job)

    async def checkpoint(self, stream: str, job: str, since: float) -> CheckpointResult | None:
        """Return the last checkpoint of the job that has landed in the stream and was not complete before `since`."""
        found = await self._landed.newest(self._client, self.namespace, stream, job=job, since=since)
        return to_checkpoint_result(found) if found else None

    async def next_checkpoints(
        self, stream: str, last_id: str, *, block_ms: int = 1000
    ) -> list[tuple[str, CheckpointResult | None]]:
        """Return what has landed since `last_id` (from the start, if empty), with ids; waits for something to land.

        None stands for what can't be read.
        """
        last_id = last_id or self._landed.START
        found = await self._landed.after(self._client, self.namespace, stream, last_id, block_ms=block_ms)
        return [(entry_id, to_checkpoint_result(one) if one else None) for entry_id, one in found]

    async def end_of_checkpoints(self, stream: str) -> str:
        """Return the id after which nothing has landed yet."""
        return await self._landed.end(self._client, self.namespace, stream)

    async def training(self, job: str) -> TrainingStatus | None:
        """Return what the job's agents have agreed on, None if there are none."""
        found = await self._events.group_status(self._client, self.namespace, job)
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
        """Return how many memberships of its trainers the job has had."""
        happened = await self._events.read(self._client, self.namespace, job)
        return len({event.generation for event in happened if event.kind == "active"})

    async def request_stop(self, job: str, reason: str) -> bool:
        """Ask a job's trainers to end with a checkpoint; False when there are none yet."""
        return await self._membership.request_stop(self._client, self.namespace, job, reason)

    async def rescale(self, rules: RescalingRules, *, dry_run: bool, policy: Policy) -> RescaleOutcome:
        """Make one pass over all jobs and pools; see `edl_runtime.autoscale.rescale`."""
        from edl_runtime.autoscale.rescale import rescale

        return await rescale(self.backend, self._client, self.namespace, rules, dry_run=dry_run, policy=policy)

    async def last_plan(self) -> RescalingPlan | None:
        """Return what the last pass has decided, None when there was none within a day."""
        from edl_runtime.autoscale.rescale import last_plan

        return await last_plan(self._client, self.namespace)

    async def started_by(self, job: str) -> str:
        """Return the token of the try that has started the job last, empty for none."""
        with unavailable_if_lost(self._client):
            token = await self._client.get(keys.started_by(self.namespace, job))
        return str(token or "")

    async def save_started_by(self, job: str, token: str) -> None:
        """Keep that for whoever goes on."""
        with unavailable_if_lost(self._client):
            await self._client.set(keys.started_by(self.namespace, job), token, ex=STARTED_BY_TTL_S)

    async def log_position(self, job: str) -> LogPosition | None:
        """Return how much of the job's log is in its task's log already; None, too, for what can't be read."""
        with unavailable_if_lost(self._client):
            kept = await self._client.get(keys.log_position(self.namespace, job))
        return decode_record(kept, LogPosition)

    async def save_log_position(self, job: str, position: LogPosition) -> None:
        """Keep that for whoever goes on."""
        with unavailable_if_lost(self._client):
            await self._client.set(
                keys.log_position(self.namespace, job), msgspec.json.encode(position), ex=LOG_POSITION_TTL_S
            )


def to_checkpoint_result(found: SavedCheckpoint) -> CheckpointResult:
    """Return a checkpoint that has landed as tasks return it."""
    return CheckpointResult(
        job=found.job, checkpoint=found.url, step=found.step, epoch=found.epoch, metrics=found.metrics, at=found.at
    )


async def job_status(backend: Backend, name: str) -> JobStatus | None:
    """Return what the backend knows of the job or pool, None if nothing."""
    try:
        return await backend.get(name)
    except UnknownJobError:
        return None
