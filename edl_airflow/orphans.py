"""Ends jobs whose tasks have left them: triggers that follow jobs of a connection look after the others', too.

A job tells whose task has started it (`origin_of`), also of which Airflow: nobody judges the jobs of another one that
shares the backend. While Airflow, Redis or the cluster does not answer, nothing is an orphan.
"""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import structlog
from airflow.sdk import Variable

from edl_airflow.client import EdlClient, open_client
from edl_airflow.hooks.edl import EdlConnection, lacks_async_channel
from edl_airflow.identity import TaskInstance
from edl_runtime.backends.interface import Origin
from edl_runtime.concurrency import SharedInLoop, all_ended
from edl_runtime.errors import EdlError

if TYPE_CHECKING:
    from edl_runtime.orphans import Orphan

AIRFLOW_ID = "edl_airflow_id"
"""The Variable that tells this Airflow from others."""

ABOUT_THE_ID = "The id of this Airflow in the jobs of edl-airflow, so that those that its tasks leave over are ended."

LOOK_EVERY_S = 60.0
"""Seconds between two looks at a connection's jobs."""

MOST_RUNS = 50
"""About how many runs of a task Airflow is asked in one request."""

clock = time.time
"""Unix seconds, for graces."""

log = structlog.get_logger(__name__)


def origin_of(ti: TaskInstance, *, outlives_task: bool) -> Origin:
    """Return the origin of a task instance's jobs. Blocks."""
    return Origin(
        airflow=_own_id(),
        dag_id=ti.dag_id,
        run_id=ti.run_id,
        task_id=ti.task_id,
        map_index=-1 if ti.map_index is None else ti.map_index,
        outlives_task=outlives_task,
    )


@asynccontextmanager
async def watching(edl_connection: EdlConnection) -> AsyncIterator[None]:
    """Look at the connection's jobs now and each minute; all who do so in an event loop share one watch.

    Of all watches of an Airflow, one looks each minute.
    """
    async with _watches.use(msgspec.json.encode(edl_connection)):
        yield


async def look(edl_connection: EdlConnection) -> str:
    """Note which jobs are orphans now, and end those whose grace is over. Return why that is not known; empty if it is.

    Under `dag.test()` nobody looks.
    """
    if lacks_async_channel():
        return ""
    try:
        async with open_client(edl_connection) as client:
            await _look(client)
    except Exception as error:  # noqa: BLE001 - Airflow, Redis or the cluster is away; whoever follows jobs goes on
        return f"{type(error).__name__}: {error}"
    return ""


async def _look(client: EdlClient) -> None:
    from edl_runtime.orphans import GRACE_S, find_orphans, forget_orphan, is_to_look, note_orphan, read_notes

    listed = await client.backend.list()
    if not any(job.origin and job.origin.airflow for job in listed):
        return
    own_id = await asyncio.to_thread(_known_id)
    if not await is_to_look(client.redis, client.namespace, client.backend.place, own_id, every_s=LOOK_EVERY_S):
        return
    jobs = [job for job in listed if job.origin and job.origin.airflow == own_id]
    states = await asyncio.to_thread(task_states, {job.origin for job in jobs if job.origin})
    noted = await read_notes(client.redis, client.namespace, jobs)
    found = find_orphans(jobs, states, noted, clock())
    for name in noted.keys() - found.keys():
        await forget_orphan(client.redis, client.namespace, name)
        log.info("orphan.needed_again", job=name)
    for name in found.keys() - noted.keys():
        await note_orphan(client.redis, client.namespace, name, found[name])
        log.warning("orphan.found", job=name, why=found[name].why, ends_in_s=GRACE_S)
    over = [(name, orphan) for name, orphan in found.items() if orphan.is_over(clock())]
    await all_ended(*(_end(client, *each) for each in over))


async def _end(client: EdlClient, name: str, orphan: Orphan) -> None:
    """End an orphan, unless a try has adopted it meanwhile. A failure is logged; the next look tries again."""
    from edl_runtime.orphans import forget_orphan

    try:
        if await client.backend.delete(name, token=orphan.token):
            log.warning("orphan.stopped", job=name, why=orphan.why)
            await forget_orphan(client.redis, client.namespace, name, ended=orphan.why)
    except EdlError as error:
        log.warning("orphan.trouble", job=name, cause=str(error))


def task_states(origins: Collection[Origin]) -> dict[Origin, str | None]:
    """Ask Airflow for the states of task instances, GONE for those that it does not know. Blocks."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    from edl_runtime.orphans import GONE

    of_tasks = defaultdict[tuple[str, str], list[Origin]](list)
    for origin in origins:
        of_tasks[origin.dag_id, origin.task_id].append(origin)
    found: dict[Origin, str | None] = {}
    for (dag_id, task_id), asked in of_tasks.items():  # of one task only, as the answer names "t", or "t_3" if mapped
        for part in (asked[at : at + MOST_RUNS] for at in range(0, len(asked), MOST_RUNS)):
            told = RuntimeTaskInstance.get_task_states(
                dag_id=dag_id, task_ids=[task_id], run_ids=sorted({one.run_id for one in part})
            )
            for one in part:
                name = task_id if one.map_index < 0 else f"{task_id}_{one.map_index}"
                found[one] = told.get(one.run_id, {}).get(name, GONE)
    return found


def _own_id() -> str:
    """Return the id of this Airflow, which its first task makes; empty where that fails: nobody judges its jobs then.

    Of two tasks that make it at the same time, the jobs of one are not judged.
    """
    try:
        if not Variable.get(AIRFLOW_ID, default=""):
            Variable.set(AIRFLOW_ID, str(uuid.uuid4()), description=ABOUT_THE_ID)
        return _known_id()
    except Exception as error:  # noqa: BLE001 - the task goes on without it
        log.warning("airflow.has_no_id", variable=AIRFLOW_ID, cause=str(error))
        return ""


@functools.cache
def _known_id() -> str:
    """Return the id of this Airflow. Raises AirflowRuntimeError if there is none, or it can't be read."""
    return str(Variable.get(AIRFLOW_ID))


async def _look_for_ever(edl_connection: EdlConnection) -> None:
    """Look each minute. Failures are logged, each once until another look has succeeded."""
    logged = ""
    while True:
        cause = await look(edl_connection)
        if cause and cause != logged:
            log.warning("orphans.unknown", cause=cause, again_s=LOOK_EVERY_S)
        logged = cause
        await asyncio.sleep(LOOK_EVERY_S)


def _begin(content: bytes) -> asyncio.Task[None]:
    return asyncio.create_task(_look_for_ever(msgspec.json.decode(content, type=EdlConnection)))


async def _close(watch: asyncio.Task[None]) -> None:
    watch.cancel()
    await asyncio.wait([watch])


_watches = SharedInLoop(_begin, _close)
"""The watch of each connection."""
