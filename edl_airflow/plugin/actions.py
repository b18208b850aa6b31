"""What the page's buttons do: each checks the user's rights itself, and is in Airflow's audit log with its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import structlog
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser

from edl_airflow.client import EdlClient, job_status, open_client
from edl_airflow.hooks.edl import DEFAULT_CONN_ID, EdlHook
from edl_airflow.identity import dag_of, try_id
from edl_airflow.plugin.access import rights_of
from edl_airflow.plugin.airflow_state import TaskKey, tasks_of_tries, write_audit
from edl_runtime.autoscale.history import RescaleOutcome, last_pass
from edl_runtime.autoscale.policy.decide import decide
from edl_runtime.autoscale.policy.interface import policy_name
from edl_runtime.backends.errors import JobReplacedError, UnknownJobError
from edl_runtime.backends.interface import JobStatus, token_owner
from edl_runtime.elastic.rendezvous.requests import await_checkpoint, request_checkpoint
from edl_runtime.errors import counted
from edl_runtime.registry.drain import drain, undo_drain

CHECKPOINT_WAIT_S = 30.0
"""How long an action waits for a checkpoint; it is written anyway."""

_log = structlog.get_logger(__name__)

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=250)]


class ForbiddenError(Exception):
    """Raised when the user may not do it, or may not know whether it exists."""


class RefusedError(Exception):
    """Raised when a job's state, or the cluster's, forbids it; the text says why."""


class Result(msgspec.Struct, frozen=True):
    """What came of an action, in words; of the policy, its pass."""

    done: str
    outcome: RescaleOutcome | None = None


class Action(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of an action: its one target, and how it is done."""

    conn: str = DEFAULT_CONN_ID

    async def target(self, _client: EdlClient) -> JobStatus | None:
        """Return the job or pool whose owner decides who may do this; None for what no DAG owns."""
        return None

    async def do(self, client: EdlClient, target: JobStatus | None) -> Result:
        """Do it to the job or pool that was checked."""
        raise NotImplementedError


class _JobAction(Action, frozen=True, kw_only=True):
    """An action on a job or pool of the backend."""

    job: Name

    async def target(self, client: EdlClient) -> JobStatus | None:
        return await client.backend.get(self.job)

    async def do(self, client: EdlClient, target: JobStatus | None) -> Result:
        assert target  # noqa: S101 - else `target` has raised
        if target.has_ended:
            raise RefusedError(f"{self.job} has ended ({target.phase}).")
        return await self.do_to(client, target)

    async def do_to(self, client: EdlClient, job: JobStatus) -> Result:
        """Do it to this job, which has not ended."""
        raise NotImplementedError


class Resize(_JobAction, frozen=True, kw_only=True):
    """Change the number of instances; suspending has an action of its own."""

    instances: Annotated[int, msgspec.Meta(ge=1)]

    async def do_to(self, client: EdlClient, job: JobStatus) -> Result:
        status = await client.backend.resize(job.name, self.instances, token=job.token)
        return Result(f"{job.name} will have {counted(status.wanted, 'instance')}.")


class Suspend(_JobAction, frozen=True, kw_only=True):
    """Take all instances away, until the job is resumed."""

    async def do_to(self, client: EdlClient, job: JobStatus) -> Result:
        await client.backend.resize(job.name, 0, token=job.token)
        return Result(f"{job.name} is being suspended; it resumes when somebody, or the policy, gives it instances.")


class Resume(_JobAction, frozen=True, kw_only=True):
    """Give a suspended job its minimum of instances."""

    async def do_to(self, client: EdlClient, job: JobStatus) -> Result:
        if not job.is_suspended or job.scaling is None:
            raise RefusedError(f"{job.name} is not suspended.")
        status = await client.backend.resize(job.name, job.scaling.bounds.min, token=job.token)
        return Result(f"{job.name} resumes with {counted(status.wanted, 'instance')}.")


class Checkpoint(_JobAction, frozen=True, kw_only=True):
    """Let an elastic training write a checkpoint now."""

    async def do_to(self, client: EdlClient, job: JobStatus) -> Result:
        if not job.elastic:
            raise RefusedError(f"{job.name} is no elastic training, and only those write checkpoints on request.")
        if job.is_suspended:
            raise RefusedError(f"{job.name} is suspended; it has written a checkpoint before.")
        await _check_run(client, job)
        number = await request_checkpoint(client.redis, client.namespace, job.name)
        try:
            async with asyncio.timeout(CHECKPOINT_WAIT_S):
                saved = await await_checkpoint(client.redis, client.namespace, job.name, number)
        except TimeoutError:
            return Result(f"{job.name} was asked for a checkpoint, and writes it after its current step.")
        await _check_run(client, job)  # the answer would tell of another's
        return Result(f"{job.name} has written a checkpoint of step {saved.step}: {saved.url}")


class Stop(_JobAction, frozen=True, kw_only=True):
    """Stop a job, and remove it."""

    async def do_to(self, client: EdlClient, job: JobStatus) -> Result:
        if not await client.backend.delete(job.name, token=job.token):
            raise JobReplacedError(job.name)
        return Result(f"{job.name} is stopped; its log is kept.")


class _TeacherAction(Action, frozen=True, kw_only=True):
    """An action on a teacher of a pool, which the backend runs, or people by hand."""

    pool: Name
    teacher: Name

    async def target(self, client: EdlClient) -> JobStatus | None:
        """Return the pool; a job of its name, or a pool that has ended, owns no teachers that were started by hand."""
        found = await job_status(client.backend, self.pool)
        return found if found and found.kind == "pool" and not found.has_ended else None


class Drain(_TeacherAction, frozen=True, kw_only=True):
    """Let a teacher leave its pool."""

    async def do(self, client: EdlClient, target: JobStatus | None) -> Result:
        if target:
            await _check_run(client, target)
        await drain(client.redis, client.namespace, self.pool, self.teacher)
        return Result(f"{self.teacher} has left {self.pool}; it answers what is in flight.")


class Undrain(_TeacherAction, frozen=True, kw_only=True):
    """Let a drained teacher join its pool again."""

    async def do(self, client: EdlClient, target: JobStatus | None) -> Result:
        if target:
            await _check_run(client, target)
        await undo_drain(client.redis, client.namespace, self.pool, self.teacher)
        return Result(f"{self.teacher} may join {self.pool} again.")


class RunPolicy(Action, frozen=True, kw_only=True):
    """Make a pass over all jobs by the rules of the last one: traffic windows are given where the policy runs."""

    dry_run: bool = True

    async def do(self, client: EdlClient, _target: JobStatus | None) -> Result:
        last = await last_pass(client.redis, client.namespace, client.backend.place)
        if last is None or last.rules is None:
            raise RefusedError(
                "Nothing has rescaled within a day, so the traffic windows are unknown here. Run the task of "
                "EdlAutoscaleOperator, or `edl autoscale`, once."
            )
        if last.had_source:
            raise RefusedError("The last pass followed traffic, which only its own task reads: run that task.")
        if last.policy not in ("", policy_name(decide)):
            raise RefusedError(
                f"The last pass was made by the policy {last.policy}. Run its task: it is not known here."
            )
        done = await client.rescale(last.rules, dry_run=self.dry_run, policy=decide)
        would = "would resize" if self.dry_run else "has resized"
        return Result(f"The policy {would} {len(done.plan.changes)} of {len(done.plan.targets)} jobs and pools.", done)


ACTIONS: Mapping[str, type[Action]] = {
    "resize": Resize,
    "suspend": Suspend,
    "resume": Resume,
    "checkpoint": Checkpoint,
    "stop": Stop,
    "drain": Drain,
    "undrain": Undrain,
    "policy": RunPolicy,
}
"""By the names that the page calls them by."""


async def act(name: str, asked: Action, user: BaseUser) -> Result:
    """Do the action of this name, and write it into the audit log, also if it fails.

    Raises ForbiddenError, RefusedError, and the errors of connection, backend and registry.
    """
    task, outcome, noted = TaskKey(), "interrupted", True
    try:
        async with open_client(await EdlHook(asked.conn).aedl_connection()) as client:
            target = await asked.target(client)
            task = await _task_of(target)
            await _check(user, task.dag_id, asked.conn)
            result = await asked.do(client, target)
            outcome = result.done
    except ForbiddenError:
        outcome = "no permission"
        raise
    except UnknownJobError:  # its text has the names of others
        outcome = "failed: there is no such job or pool"
        raise
    except Exception as error:
        outcome = f"failed: {error}"
        raise
    finally:
        noted = await asyncio.shield(asyncio.to_thread(_note, name, asked, user, task, outcome))
    if noted:
        return result
    return msgspec.structs.replace(result, done=f"{result.done} Airflow's audit log could not be written.")


async def _check_run(client: EdlClient, job: JobStatus) -> None:
    """Raise JobReplacedError if another owner's job has this job's name now, for what Redis keeps by names alone."""
    if (await client.backend.get(job.name)).token != job.token:
        raise JobReplacedError(job.name)


async def _check(user: BaseUser, dag_id: str, conn_id: str) -> None:
    rights = await asyncio.to_thread(rights_of, user, {dag_id}, conn_id)
    if dag_id not in rights.changes:
        raise ForbiddenError


def _note(name: str, asked: Action, user: BaseUser, task: TaskKey, outcome: str) -> bool:
    """Write the audit log; return whether that succeeded. Blocks. What can't be written there is logged."""
    given: dict[str, Any] = {**msgspec.structs.asdict(asked), "outcome": outcome}
    try:
        write_audit(f"edl.{name}", user.get_name(), task, given)
    except Exception as error:  # noqa: BLE001 - what was done is done, and has to be told
        task_fields = {field: getattr(task, field) for field in task.__struct_fields__}
        _log.error("audit.lost", action=name, user=user.get_name(), **task_fields, **given, cause=str(error))
        return False
    return True


async def _task_of(job: JobStatus | None) -> TaskKey:
    """Return the task instance that has started a job, as far as it is known: its DAG, or nothing."""
    dag_id = dag_of(token_owner(job.token)) if job else ""
    if not job or not dag_id:
        return TaskKey()
    a_try = try_id(job.token)
    tasks = await asyncio.to_thread(tasks_of_tries, [a_try])
    found = tasks.get(a_try)
    return found if found and found.dag_id == dag_id else TaskKey(dag_id=dag_id)
