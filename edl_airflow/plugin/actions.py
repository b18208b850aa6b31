"""What the page's buttons do: each checks the user's rights itself, and is in Airflow's audit log with its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser

from edl_airflow.client import EdlClient, job_status, open_client
from edl_airflow.hooks.edl import DEFAULT_CONN_ID, EdlHook
from edl_airflow.identity import dag_of
from edl_airflow.plugin.access import rights_of
from edl_airflow.plugin.airflow_state import TaskKey, tasks_of_tries, write_audit
from edl_runtime.autoscale.history import RescaleOutcome, last_pass
from edl_runtime.autoscale.policy.decide import decide
from edl_runtime.autoscale.policy.interface import policy_name
from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import JobStatus
from edl_runtime.elastic.rendezvous.requests import await_checkpoint, request_checkpoint
from edl_runtime.registry.drain import drain, undo_drain

CHECKPOINT_WAIT_S = 30.0
"""How long an action waits for a checkpoint; it is written anyway."""


class ActionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of an action; each takes the fields that it needs."""

    conn: str = DEFAULT_CONN_ID
    job: str = ""
    pool: str = ""
    teacher: str = ""
    instances: int | None = None
    dry_run: bool = True

    @property
    def name(self) -> str:
        """The job or pool that is meant; empty for the policy, which is about all."""
        return self.job or self.pool


class ForbiddenError(Exception):
    """Raised when the user may not do it, or may not know whether it exists."""


class RefusedError(Exception):
    """Raised when a job's state, or the cluster's, forbids it; the text says why."""


class Result(msgspec.Struct, frozen=True):
    """What came of an action, in words; of the policy, its pass."""

    done: str
    outcome: RescaleOutcome | None = None


async def act(action: str, asked: ActionRequest, user: BaseUser) -> Result:
    """Do it, and write it into the audit log, also if it fails.

    Raises ForbiddenError, RefusedError, and the errors of connection, backend and registry.
    """
    task = TaskKey()
    outcome = "interrupted"
    try:
        async with open_client(await EdlHook(asked.conn).aedl_connection()) as client:
            dag_id, task = await _owner(client, asked.name)
            await _check(user, dag_id, asked.conn)
            result = await ACTIONS[action](client, asked)
        outcome = result.done
    except ForbiddenError:
        outcome = "no permission"
        raise
    except Exception as error:
        outcome = f"failed: {error}"
        raise
    finally:
        extra = {**_given(action, asked), "outcome": outcome}
        await asyncio.shield(asyncio.to_thread(write_audit, f"edl.{action}", user.get_name(), task, extra))
    return result


async def _check(user: BaseUser, dag_id: str, conn_id: str) -> None:
    rights = await asyncio.to_thread(rights_of, user, {dag_id}, conn_id)
    if dag_id not in rights.changes:
        raise ForbiddenError


async def _owner(client: EdlClient, name: str) -> tuple[str, TaskKey]:
    """Return the DAG that a job is of, and the task instance, as far as they are known; empty for none."""
    if not name:
        return "", TaskKey()
    try:
        dag_id = dag_of(await client.backend.owner(name))
    except UnknownJobError:  # a pool of teachers that were started by hand, or nothing
        return "", TaskKey()
    status = await job_status(client.backend, name)
    a_try = status.token.rpartition("/")[2] if status and dag_id else ""
    tasks = await asyncio.to_thread(tasks_of_tries, [a_try])
    return dag_id, tasks.get(a_try) or TaskKey(dag_id=dag_id)


async def _resize(client: EdlClient, asked: ActionRequest) -> Result:
    if asked.instances is None or asked.instances < 1:
        raise RefusedError("Give `instances`, 1 or more; suspending has an action of its own.")
    status = await client.backend.resize(asked.name, asked.instances)
    return Result(f"{status.name} will have {_instances(status.wanted)}.")


async def _suspend(client: EdlClient, asked: ActionRequest) -> Result:
    status = await client.backend.resize(asked.name, 0)
    return Result(f"{status.name} is being suspended; it resumes when somebody, or the policy, gives it instances.")


async def _resume(client: EdlClient, asked: ActionRequest) -> Result:
    status = await _active(client, asked.name)
    if not status.is_suspended or status.scaling is None:
        raise RefusedError(f"{asked.name} is not suspended.")
    status = await client.backend.resize(asked.name, status.scaling.bounds.min)
    return Result(f"{status.name} resumes with {_instances(status.wanted)}.")


async def _checkpoint(client: EdlClient, asked: ActionRequest) -> Result:
    status = await _active(client, asked.name)
    if not status.elastic:
        raise RefusedError(f"{asked.name} is no elastic training, and only those write checkpoints on request.")
    if status.is_suspended:
        raise RefusedError(f"{asked.name} is suspended; it has written a checkpoint before.")
    number = await request_checkpoint(client.redis, client.namespace, asked.name)
    try:
        async with asyncio.timeout(CHECKPOINT_WAIT_S):
            saved = await await_checkpoint(client.redis, client.namespace, asked.name, number)
    except TimeoutError:
        return Result(f"{asked.name} was asked for a checkpoint, and writes it after its current step.")
    return Result(f"{asked.name} has written a checkpoint of step {saved.step}: {saved.url}")


async def _stop(client: EdlClient, asked: ActionRequest) -> Result:
    await _active(client, asked.name)
    await client.backend.delete(asked.name)
    return Result(f"{asked.name} is stopped; its log is kept.")


async def _drain(client: EdlClient, asked: ActionRequest) -> Result:
    await drain(client.redis, client.namespace, asked.pool, asked.teacher)
    return Result(f"{asked.teacher} has left {asked.pool}; it answers what is in flight.")


async def _undrain(client: EdlClient, asked: ActionRequest) -> Result:
    await undo_drain(client.redis, client.namespace, asked.pool, asked.teacher)
    return Result(f"{asked.teacher} may join {asked.pool} again.")


async def _policy(client: EdlClient, asked: ActionRequest) -> Result:
    """Make a pass by the rules of the last one: traffic windows are given where the policy runs, not here."""
    last = await last_pass(client.redis, client.namespace)
    if last is None or last.rules is None:
        raise RefusedError(
            "Nothing has rescaled within a day, so the traffic windows are unknown here. Run the task of "
            "EdlAutoscaleOperator, or `edl autoscale`, once."
        )
    if last.policy not in ("", policy_name(decide)):
        raise RefusedError(f"The last pass was made by the policy {last.policy}. Run its task: it is not known here.")
    done = await client.rescale(last.rules, dry_run=asked.dry_run, policy=decide)
    changes = len(done.plan.changes)
    would = "would resize" if asked.dry_run else "has resized"
    return Result(f"The policy {would} {changes} of {len(done.plan.targets)} jobs and pools.", done)


async def _active(client: EdlClient, name: str) -> JobStatus:
    status = await client.backend.get(name)
    if status.has_ended:
        raise RefusedError(f"{name} has ended ({status.phase}).")
    return status


def _instances(count: int) -> str:
    return f"{count} instance{'' if count == 1 else 's'}"


ACTIONS: Mapping[str, Callable[[EdlClient, ActionRequest], Awaitable[Result]]] = {
    "resize": _resize,
    "suspend": _suspend,
    "resume": _resume,
    "checkpoint": _checkpoint,
    "stop": _stop,
    "drain": _drain,
    "undrain": _undrain,
    "policy": _policy,
}
"""By name; see the page's buttons."""

NEEDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("resize", "suspend", "resume", "checkpoint", "stop"), ("job",)),
    **dict.fromkeys(("drain", "undrain"), ("pool", "teacher")),
    "policy": (),
}
"""The fields that an action has to have."""


def _given(action: str, asked: ActionRequest) -> dict[str, Any]:
    """Return what was asked for, for the audit log."""
    given: dict[str, Any] = msgspec.structs.asdict(asked)
    if action != "policy":
        del given["dry_run"]
    return {name: value for name, value in given.items() if value not in ("", None)}


def missing_field(action: str, asked: ActionRequest) -> str:
    """Return a field that the action needs and that is empty; empty if none is."""
    given: dict[str, Any] = msgspec.structs.asdict(asked)
    return next((field for field in NEEDS[action] if not given[field]), "")
