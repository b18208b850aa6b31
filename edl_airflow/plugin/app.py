"""The plugin's web pages.

Read only; anybody who is logged in to Airflow may see them, whichever DAGs that person may see.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated

from airflow.api_fastapi.core_api.security import requires_authenticated  # not declared public: imported only here
from airflow.sdk.exceptions import AirflowNotFoundException
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse

from edl_airflow.conductor import job_status
from edl_airflow.hooks.edl import EdlHook
from edl_airflow.links import Address
from edl_airflow.plugin import pages
from edl_airflow.site import Site, open_site
from edl_runtime.errors import RegistryError, SpecError, UnknownJobError
from edl_runtime.pool_reports import PoolDemand
from edl_runtime.progress import Progress

TAIL_LINES = 500


def make_app() -> FastAPI:
    """Return the pages as an app to be mounted."""
    app = FastAPI(dependencies=[Depends(requires_authenticated())], docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(UnknownJobError, _no_job)
    for error in (SpecError, AirflowNotFoundException):
        app.add_exception_handler(error, _no_connection)
    app.middleware("http")(_guard)
    app.get("/jobs/{conn_id}/{job}", response_class=HTMLResponse)(show_job)
    app.get("/jobs/{conn_id}/{job}/log", response_class=HTMLResponse)(show_log)
    app.get("/pools/{conn_id}/{pool}", response_class=HTMLResponse)(show_pool)
    app.get("/rescaling/{conn_id}", response_class=HTMLResponse)(show_rescaling)
    return app


async def show_job(conn_id: str, job: str) -> str:
    """The job's instances, what they wait for, and how far the job is."""
    async with _site(conn_id) as site:
        status = await job_status(site.backend, job)
        if status is None:
            [line async for line in site.backend.logs(job, tail=1)]  # a job that there never was has none
        return pages.job_page(Address(conn_id, job), status, await _progress(site, job), await _members(site, job))


async def show_log(
    conn_id: str,
    job: str,
    tail: Annotated[int, Query(ge=1, le=100_000)] = TAIL_LINES,
    instance: Annotated[int | None, Query(ge=0)] = None,
) -> str:
    """The end of the merged log of all the job's instances, or of one's, and how far the job is."""
    async with _site(conn_id) as site:
        status = await job_status(site.backend, job)  # None once removed; its log is still there
        lines = [line async for line in site.backend.logs(job, tail=tail, instance=instance)]
        return pages.log_page(Address(conn_id, job), status, await _progress(site, job), lines, instance)


async def show_pool(conn_id: str, pool: str) -> str:
    """Who is registered with the pool, what it serves, and the instances that the backend runs for it."""
    async with _site(conn_id) as site:
        status = await job_status(site.backend, pool)
        try:
            teachers = await site.members(pool, "teachers")
            students = await site.members(pool, "students")
            said, trouble = await site.demand(pool), ""
        except RegistryError as error:
            teachers, students, said, trouble = [], [], PoolDemand(), str(error)
    return pages.pool_page(Address(conn_id, pool), status, teachers, students, said, trouble=trouble)


async def show_rescaling(conn_id: str) -> str:
    """What the last rescaling has decided: how much training may use, and what each job and pool should have."""
    async with _site(conn_id) as site:
        try:
            return pages.rescaling_page(conn_id, await site.last_plan(), trouble="")
        except RegistryError as error:
            return pages.rescaling_page(conn_id, None, trouble=str(error))


@asynccontextmanager
async def _site(conn_id: str) -> AsyncIterator[Site]:
    async with open_site(await EdlHook(conn_id).asurroundings()) as site:
        yield site


async def _progress(site: Site, job: str) -> Progress | None:
    try:
        return await site.progress(job)
    except RegistryError:
        return None


async def _members(site: Site, job: str) -> tuple[int, ...]:
    try:
        training = await site.training(job)
    except RegistryError:
        return ()
    return training.members if training else ()


async def _no_job(_: Request, error: Exception) -> Response:
    return _not_found(str(error))


async def _no_connection(_: Request, __: Exception) -> Response:
    """Say nothing of a connection that is not ours to show, not even whether there is one."""
    return _not_found("There is no connection of that name that leads to jobs and pools.")


def _not_found(text: str) -> Response:
    return HTMLResponse(pages.message_page("Not found", text), status_code=404)


async def _guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await call_next(request)
    response.headers["Content-Security-Policy"] = "default-src 'none'; style-src 'unsafe-inline'"
    response.headers["Cache-Control"] = "no-store"
    return response
