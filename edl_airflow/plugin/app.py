"""The plugin's web pages, read only, for users who are logged in to Airflow.

A task's job or pool is shown to users who may read that DAG's task logs; one that no task has started, to users who may
read all DAGs' task logs. Users who may see the cluster's activity see the last rescaling, and the members of pools that
no task has started.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated

import msgspec
from airflow.sdk.exceptions import AirflowNotFoundException
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse

from edl_airflow.client import EdlClient, job_status, open_client
from edl_airflow.hooks.edl import EdlHook
from edl_airflow.identity import dag_of
from edl_airflow.links import PageUrls
from edl_airflow.plugin import access, pages
from edl_airflow.plugin.pages import LogTail
from edl_airflow.runtime.log import latest_progress
from edl_runtime.backends.errors import UnknownJobError
from edl_runtime.backends.interface import JobStatus
from edl_runtime.errors import SpecError
from edl_runtime.pool_reports import PoolDemand
from edl_runtime.progress import Progress
from edl_runtime.store.errors import RegistryError

TAIL_LINES = 500
"""Lines of each instance by default; a page with more does not reload itself."""

MOST_LINES = 10_000


class _DeniedError(Exception):
    """Raised when the user may not see a page."""


def make_app() -> FastAPI:
    """Return the pages as an app to be mounted."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(_DeniedError, _denied)
    app.add_exception_handler(UnknownJobError, _no_job)
    for error in (SpecError, AirflowNotFoundException):
        app.add_exception_handler(error, _no_connection)
    app.middleware("http")(_guard)
    app.get("/jobs/{conn_id}/{job}", response_class=HTMLResponse)(show_job)
    app.get("/jobs/{conn_id}/{job}/log", response_class=HTMLResponse)(show_log)
    app.get("/pools/{conn_id}/{pool}", response_class=HTMLResponse)(show_pool)
    app.get("/rescaling/{conn_id}", response_class=HTMLResponse)(show_rescaling)
    return app


async def show_job(request: Request, conn_id: str, job: str) -> str:
    """The job's instances and progress."""
    async with _client(conn_id) as client:
        await _check_log(request, client, job)
        status = await job_status(client.backend, job)
        if status is None:
            [
                line async for line in client.backend.logs(job, tail=1)
            ]  # raises UnknownJobError if there never was such a job
        progress, members = await _progress(client, job, status), await _members(client, job)
    return await asyncio.to_thread(pages.job_page, PageUrls(conn_id, job), status, progress, members)


async def show_log(
    request: Request,
    conn_id: str,
    job: str,
    tail: Annotated[int, Query(ge=1, le=MOST_LINES)] = TAIL_LINES,
    instance: Annotated[int | None, Query(ge=0)] = None,
) -> str:
    """The last lines of the log of all instances, or of one, and the job's progress.

    `tail` lines of each instance, within the limit of LogTail for all.
    """
    log = LogTail()
    async with _client(conn_id) as client:
        await _check_log(request, client, job)
        status = await job_status(client.backend, job)  # None once removed; its log is still there
        async for line in client.backend.logs(job, tail=tail, instance=instance):
            log.add(line)
        progress = await _progress(client, job, status)
    reloads = tail <= TAIL_LINES and not log.left_out
    at = PageUrls(conn_id, job)
    return await asyncio.to_thread(pages.log_page, at, status, progress, log, instance, reloads=reloads)


async def show_pool(request: Request, conn_id: str, pool: str) -> str:
    """The pool's registered members, its model, and its instances."""
    async with _client(conn_id) as client:
        may_read_log = await _may_read_log(request, client, pool)
        if not may_read_log:
            await _check_cluster(request)
            if await _dag(client, pool):
                raise _DeniedError
        status = await job_status(client.backend, pool)
        if status and not may_read_log:
            status = msgspec.structs.replace(status, last_lines=())
        try:
            teachers = await client.members(pool, "teachers")
            students = await client.members(pool, "students")
            demand, trouble = await client.demand(pool), ""
        except RegistryError as error:
            teachers, students, demand, trouble = [], [], PoolDemand(), str(error)
    at = PageUrls(conn_id, pool)
    return await asyncio.to_thread(pages.pool_page, at, status, teachers, students, demand, trouble=trouble)


async def show_rescaling(request: Request, conn_id: str) -> str:
    """The last rescaling: what training may use, and the target of each job and pool."""
    await _check_cluster(request)
    plan, trouble = None, ""
    async with _client(conn_id) as client:
        try:
            plan = await client.last_plan()
        except RegistryError as error:
            trouble = str(error)
    return await asyncio.to_thread(pages.rescaling_page, conn_id, plan, trouble=trouble)


async def _dag(client: EdlClient, job: str) -> str:
    """Return the DAG whose task has started a job or pool, empty for none."""
    try:
        return dag_of(await client.backend.owner(job))
    except UnknownJobError:
        return ""


async def _may_read_log(request: Request, client: EdlClient, job: str) -> bool:
    return await asyncio.to_thread(access.may_read_logs, request.state.edl_user, await _dag(client, job))


async def _check_log(request: Request, client: EdlClient, job: str) -> None:
    if not await _may_read_log(request, client, job):
        raise _DeniedError


async def _check_cluster(request: Request) -> None:
    if not await asyncio.to_thread(access.may_see_cluster, request.state.edl_user):
        raise _DeniedError


@asynccontextmanager
async def _client(conn_id: str) -> AsyncIterator[EdlClient]:
    async with open_client(await EdlHook(conn_id).aedl_connection()) as client:
        yield client


async def _progress(client: EdlClient, job: str, status: JobStatus | None) -> Progress | None:
    """Return the last report of this run of the job; of a removed job, of its last run."""
    try:
        return await (latest_progress(status, client) if status else client.progress(job))
    except RegistryError:
        return None


async def _members(client: EdlClient, job: str) -> tuple[int, ...]:
    try:
        training = await client.training(job)
    except RegistryError:
        return ()
    return training.members if training else ()


async def _denied(_: Request, __: Exception) -> Response:
    """The same page for what does not exist, as names are not public either."""
    text = "It does not exist, or it belongs to no DAG whose task logs you may read."
    return HTMLResponse(pages.message_page("No permission", text), status_code=403)


async def _no_job(_: Request, error: Exception) -> Response:
    return _not_found(str(error))


async def _no_connection(_: Request, __: Exception) -> Response:
    """Reveal nothing about connections of other types, not even that they exist."""
    return _not_found("There is no such connection of type edl.")


def _not_found(text: str) -> Response:
    return HTMLResponse(pages.message_page("Not found", text), status_code=404)


async def _guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse every request of users who are not logged in."""
    request.state.edl_user = await access.user_of(request)
    if request.state.edl_user is None:
        response: Response = HTMLResponse(pages.message_page("Not logged in", "Log in to Airflow first."), 401)
    else:
        response = await call_next(request)
    response.headers["Content-Security-Policy"] = "default-src 'none'; style-src 'unsafe-inline'"
    response.headers["Cache-Control"] = "no-store"
    return response
