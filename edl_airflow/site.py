"""What a connection leads to: a backend that runs jobs, and a Redis that knows who is alive."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from edl_airflow.hooks.edl import Surroundings
from edl_airflow.joblog import Position
from edl_airflow.work import KubernetesPlace, LandedCheckpoint, LocalPlace, Place, Training
from edl_runtime import progress
from edl_runtime.store import keys
from edl_runtime.store.client import connect, unavailable_if_lost
from edl_runtime.store.records import decoded

if TYPE_CHECKING:
    from edl_runtime.autoscale.approval import Answer
    from edl_runtime.autoscale.plan import Plan, Rules
    from edl_runtime.autoscale.policies import Policy
    from edl_runtime.autoscale.rescale import Rescaled
    from edl_runtime.backends.base import Backend
    from edl_runtime.backends.kubernetes import KubernetesBackend
    from edl_runtime.checkpoint.landed import Landed
    from edl_runtime.pool_reports import PoolDemand
    from edl_runtime.progress import Progress
    from edl_runtime.registry.members import Member
    from edl_runtime.store.keys import Role


_pods: dict[bytes, KubernetesBackend] = {}

POSITION_KEPT_S = 24 * 3600
"""How long it is known how much of a job's log has been shown, after the last that was."""

BEGUN_KEPT_S = 30 * 24 * 3600
"""How long it is known which try has started a job: longer than one trains."""


def backend_at(place: Place) -> Backend:
    """Return the backend: all that is needed to stop a job, without Redis and without the `edl` connection."""
    if isinstance(place, LocalPlace):
        from edl_runtime.backends.local import LocalBackend

        return LocalBackend(place.work_dir)
    return _pods_at(place)


def _pods_at(place: KubernetesPlace) -> KubernetesBackend:
    """Return the one backend of that place: all tasks of a triggerer share what it watches."""
    from edl_airflow.cluster import way_to
    from edl_runtime.backends.kubernetes import KubernetesBackend

    made = KubernetesBackend(way_to(place.conn_id), namespace=place.namespace, defaults=place.pod)
    return _pods.setdefault(msgspec.json.encode(place), made)


@asynccontextmanager
async def _followed(place: Place) -> AsyncIterator[Backend]:
    """Open a backend that is asked often, without asking a cluster as often."""
    if isinstance(place, LocalPlace):
        yield await asyncio.to_thread(backend_at, place)
        return
    from edl_airflow.cluster import forget_way

    forget_way(place.conn_id)  # what it says may have been edited since
    pods = await asyncio.to_thread(_pods_at, place)
    async with pods.following() as followed:
        yield followed


@asynccontextmanager
async def open_site(surroundings: Surroundings) -> AsyncIterator[Site]:
    """Open what a connection leads to, and close its sockets on exit. Raises nothing for a Redis that is away.

    Nothing is sent to Redis yet, so work that needs only the backend goes on while Redis is away.
    """
    async with _followed(surroundings.place) as backend:
        site = await asyncio.to_thread(Site, surroundings, backend)  # imports Redis's client, which takes a second
        try:
            yield site
        finally:
            await site.close()


class Site:
    """Where instances run (`backend`), what they may know (`secrets`) and who is alive. Made by `open_site`.

    All that asks Redis raises RegistryUnavailableError.
    """

    def __init__(self, surroundings: Surroundings, backend: Backend) -> None:
        from edl_runtime.checkpoint import landed
        from edl_runtime.elastic import events, glance, membership
        from edl_runtime.registry.demands import demands
        from edl_runtime.registry.directory import Directory

        self.namespace = surroundings.namespace
        self.secrets = surroundings.secrets(os.environ)
        self.backend = backend
        self._client = connect(surroundings.redis_url)
        self._directory = Directory(self._client, surroundings.namespace)
        self._demands = demands
        self._landed, self._events, self._glance, self._membership = landed, events, glance, membership

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
        return await progress.read(self._client, self.namespace, job)

    async def checkpoint(self, stream: str, job: str, since: float) -> LandedCheckpoint | None:
        """Return the last checkpoint of the job that has landed in the stream and was not complete before `since`."""
        found = await self._landed.newest(self._client, self.namespace, stream, job=job, since=since)
        return as_result(found) if found else None

    async def next_checkpoints(
        self, stream: str, last_id: str, *, block_ms: int = 1000
    ) -> list[tuple[str, LandedCheckpoint | None]]:
        """Return what has landed since `last_id` (from the start, if empty), with ids; waits for something to land.

        None stands for what can't be read.
        """
        last_id = last_id or self._landed.START
        found = await self._landed.after(self._client, self.namespace, stream, last_id, block_ms=block_ms)
        return [(entry_id, as_result(one) if one else None) for entry_id, one in found]

    async def end_of_checkpoints(self, stream: str) -> str:
        """Return the id after which nothing has landed yet."""
        return await self._landed.end(self._client, self.namespace, stream)

    async def training(self, job: str) -> Training | None:
        """Return what the job's agents have agreed on, None if there are none."""
        found = await self._glance.glance(self._client, self.namespace, job)
        if not found:
            return None
        outcome = found.outcome
        return Training(
            members=found.members,
            ended=outcome.kind if outcome else "",
            reason=outcome.reason if outcome else "",
            heard_at=found.heard_at,
        )

    async def generations(self, job: str) -> int:
        """Return how many memberships of its trainers the job has had."""
        happened = await self._events.read(self._client, self.namespace, job)
        return len({event.generation for event in happened if event.kind == "active"})

    async def ask_to_end(self, job: str, reason: str) -> bool:
        """Ask a job's trainers to end with a checkpoint; False when there are none yet."""
        return await self._membership.request_stop(self._client, self.namespace, job, reason)

    async def rescale(self, rules: Rules, *, dry_run: bool, policy: Policy) -> Rescaled:
        """Make one pass over all jobs and pools; see `edl_runtime.autoscale.rescale`."""
        from edl_runtime.autoscale.rescale import rescale

        return await rescale(self.backend, self._client, self.namespace, rules, dry_run=dry_run, policy=policy)

    async def last_plan(self) -> Plan | None:
        """Return what the last pass has decided, None when there was none within a day."""
        from edl_runtime.autoscale.rescale import last_plan

        return await last_plan(self._client, self.namespace)

    async def keep_shrink_answer(self, job: str, answer: Answer, *, for_s: float, unless_kept: bool = False) -> None:
        """Keep for so many seconds whether a job or pool may shrink, `unless_kept` only where no answer is kept."""
        from edl_runtime.autoscale.approval import keep_answer

        await keep_answer(self._client, self.namespace, job, answer, for_s=for_s, unless_kept=unless_kept)

    async def shrink_answer(self, job: str) -> Answer | None:
        """Return whether a job or pool may shrink, None if nobody has said so lately."""
        from edl_runtime.autoscale.approval import kept_answer

        return await kept_answer(self._client, self.namespace, job)

    async def begun_by(self, job: str) -> str:
        """Return the token of the try that has started the job last, empty for none."""
        with unavailable_if_lost(self._client):
            token = await self._client.get(keys.begun_by(self.namespace, job))
        return str(token or "")

    async def keep_begun_by(self, job: str, token: str) -> None:
        """Keep that for whoever goes on."""
        with unavailable_if_lost(self._client):
            await self._client.set(keys.begun_by(self.namespace, job), token, ex=BEGUN_KEPT_S)

    async def log_position(self, job: str) -> Position | None:
        """Return how much of the job's log is in its task's log already; None, too, for what can't be read."""
        with unavailable_if_lost(self._client):
            kept = await self._client.get(keys.log_position(self.namespace, job))
        return decoded(kept, Position)

    async def keep_log_position(self, job: str, position: Position) -> None:
        """Keep that for whoever goes on."""
        with unavailable_if_lost(self._client):
            await self._client.set(
                keys.log_position(self.namespace, job), msgspec.json.encode(position), ex=POSITION_KEPT_S
            )


def as_result(found: Landed) -> LandedCheckpoint:
    """Return a checkpoint that has landed as tasks return it."""
    return LandedCheckpoint(
        job=found.job, checkpoint=found.url, step=found.step, epoch=found.epoch, metrics=found.metrics, at=found.at
    )
