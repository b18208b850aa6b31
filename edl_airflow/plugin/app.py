"""The page and its API, for users who are logged in to Airflow: docs/how-to/airflow-ui.md."""

from __future__ import annotations

import asyncio
import math
import mimetypes
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from functools import wraps
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
from airflow.sdk.exceptions import AirflowNotFoundException
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError

from edl_airflow.client import EdlClient
from edl_airflow.identity import dag_of, owner
from edl_airflow.plugin import access, actions, answers, viewers
from edl_airflow.plugin.airflow_state import TaskKey
from edl_airflow.plugin.answers import answer_with, encoded, error_answer, forged, json_answer
from edl_airflow.plugin.downloads import LogDownload
from edl_airflow.plugin.live import NO_JOBS, Seen, every_s
from edl_airflow.plugin.log_tail import MOST_LINES, whole_log
from edl_airflow.plugin.past import Life, PastReader, events_of, life_of, timeline
from edl_airflow.plugin.runs import JobRun, run_of
from edl_airflow.plugin.viewers import About, Asked, DeniedError, Name, SilentBackendError, kept_of
from edl_airflow.plugin.views import Scope, View
from edl_runtime.backends.errors import JobEndedError, JobReplacedError, UnknownJobError
from edl_runtime.concurrency import all_completed
from edl_runtime.elastic.errors import NoCheckpointError
from edl_runtime.elastic.rendezvous.redis_store import Event, last_events
from edl_runtime.errors import BackendError, EdlError, SpecError
from edl_runtime.progress import CurvePoint, read_curve
from edl_runtime.registry.drain import drained_members
from edl_runtime.registry.errors import UnknownTeacherError
from edl_runtime.store.errors import RegistryError
from edl_runtime.store.redis_client import readable

STATIC = Path(__file__).parent / "static"

MOST_BODY = 4096
MOST_DOWNLOADS = 8
"""Logs that are downloaded at a time."""

MOST_DOWNLOADS_OF_USER = 2
"""Of them, so that a user whose clients read slowly leaves some to others."""

MOST_REMOVED = 50
"""Removed jobs and pools of a run that its tab offers."""

CURVE_POINTS = 500
EVENTS = 200
LONGEST_S = 20.0
"""How long any question may take: less than the page waits, so that it says what is away and polls don't pile up."""


def make_app() -> FastAPI:
    """Return the page and its API as an app to be mounted."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for errors, answer in (
        ((DeniedError, actions.ForbiddenError, UnknownJobError), answers.denied),
        ((AirflowNotFoundException,), answers.no_connection),
        (
            (actions.RefusedError, JobEndedError, JobReplacedError, NoCheckpointError, UnknownTeacherError),
            answers.conflict,
        ),
        ((SpecError, RequestValidationError), answers.invalid),
        ((BackendError, RegistryError, EdlError, OSError), answers.unavailable),
    ):
        for error in errors:
            app.add_exception_handler(error, answer)
    app.middleware("http")(answers.guard)
    app.get("/")(page)
    app.get("/static/{name}")(static)
    app.get("/api/overview")(_in_time(overview))
    app.get("/api/job")(_in_time(show_job))
    app.get("/api/pool")(_in_time(show_pool))
    app.get("/api/timeline")(_in_time(show_timeline))
    app.get("/api/log")(_in_time(show_log))
    app.get("/api/log/download")(_in_time(download_log))
    app.post("/api/actions/{action}")(act)
    return app


async def page(request: Request) -> Response:
    """Answer the page as HTML."""
    return await static(request, "index.html")


async def static(request: Request, name: str) -> Response:
    """Answer a file of the page, 404 for all other names."""
    content = await asyncio.to_thread(_file, name)
    if content is None:
        return error_answer(404, "There is no such file.")
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    kind = "text/javascript" if name.endswith(".js") else kind
    return answer_with(request, content, kind=kind)


async def overview(request: Request, about: About) -> Response:
    """Answer all jobs and pools that the user sees, with their actions, and the cluster to who may see its activity.

    Of a task or run only its own. 304 while nothing has changed.
    """
    seen, rights, scope = await about.parts(NO_JOBS)
    kept = about.kept
    conns = await kept.listed(about.user) if scope.is_all else []  # a tab has those of its links
    if about.conn_id and about.conn_id not in conns:
        conns = [*conns, about.conn_id]
    removed = await _removed(about, seen, scope)

    def made() -> tuple[str, bytes]:
        return encoded(View(seen, rights, scope).overview(about.conn_id, conns, every_s(len(seen.jobs)), removed))

    key = (about.conn_id, seen.version, rights, scope, tuple(conns), removed)
    etag, content = await kept.answers.get(key, lambda: asyncio.to_thread(made), holds_s=math.inf)
    return answer_with(request, content, etag=etag, at=seen.snapshot.at)


async def show_job(request: Request, about: About, job: Name) -> Response:
    """Answer one job with its instances, curve and events; `job` is null once it was removed."""
    seen, view = await about.view()
    lacks: list[Exception] = []
    curve: list[CurvePoint] = []
    events: list[Event] = []
    members: tuple[int, ...] = ()
    async with about.kept.clients.open(seen.digest) as client:
        run, rights = await _rights_on(about, client, job)
        if not rights.sees:
            raise DeniedError
        try:
            life = await _life(about.kept.past(seen.digest), client, run)
            curve, found, training = await all_completed(
                read_curve(client.redis, client.namespace, job, most=CURVE_POINTS),
                last_events(client.redis, client.namespace, [job], most=EVENTS),
                client.training(job),
            )
            members = training.members if training else ()
            curve = [point for point in curve if life and life.has(point.at)]
            events = [one for one in readable(found[job]) if life and life.has(one.at) and one.at >= run.created_at]
        except RegistryError as error:
            lacks.append(error)

    def made() -> dict[str, Any]:
        line = view.line(job)
        return {
            "at": seen.snapshot.at,
            "problems": view.problems(*lacks),
            "job": view.job(line) if line else None,
            "instances": view.instances(job, members),
            "last_lines": view.last_lines(job),
            "curve": view.curve(curve),
            "events": view.events(job, events),
            "can_log": rights.reads_log,
        }

    return await json_answer(request, made, at=seen.snapshot.at)


async def show_pool(request: Request, about: About, pool: Name) -> Response:
    """Answer one pool with its teachers and instances, and the drained teachers that may be undrained."""
    seen, view = await about.view()
    line = view.pool_line(pool)
    if line is None:
        raise DeniedError
    drained: list[str] = []
    lacks: list[Exception] = []
    if line.wanted is None or len(line.members) < line.wanted:  # else others have taken the places of those drained
        try:
            async with about.kept.clients.open(seen.digest) as client:
                drained = await drained_members(client.redis, client.namespace, pool)
        except RegistryError as error:
            lacks.append(error)

    def made() -> dict[str, Any]:
        return {
            "at": seen.snapshot.at,
            "problems": view.problems(*lacks),
            "pool": view.pool(line),
            "instances": view.instances(pool),
            "drained": drained,
        }

    return await json_answer(request, made, at=seen.snapshot.at)


async def show_timeline(request: Request, about: About, job: Name = "") -> Response:
    """Answer the last day of the jobs and pools that the user sees, or of one, and what is expected of the next.

    Windows and traffic are for those who may see the cluster's activity.
    """
    seen, rights, scope = await about.parts()
    view = await asyncio.to_thread(View, seen, rights, scope)
    kept = about.kept
    past = kept.past(seen.digest)
    async with kept.clients.open(seen.digest) as client:
        points = await past.points(client)
        lives = {name: life_of(seen.jobs[name]) for name in view.in_scope() & seen.jobs.keys()}
        lives |= await _visible(about, scope, await past.removed(client, seen.jobs))
    lives = {name: life for name, life in lives.items() if name == job or not job}

    async def ask() -> tuple[str, bytes]:
        now = time.time()
        there = {name for name, status in seen.jobs.items() if not status.elastic}
        async with kept.clients.open(seen.digest) as client:
            events = await events_of(client, {name: life for name, life in lives.items() if name not in there})
        return await asyncio.to_thread(lambda: encoded(view.timeline(timeline(points, events, seen, lives, now))))

    decided_at = seen.done.plan.at if seen.done else 0.0
    since = frozenset((name, life.since) for name, life in lives.items())
    key = (seen.digest, past.version, decided_at, rights, since)
    etag, content = await kept.answers.get(key, ask, holds_s=math.inf)
    return answer_with(request, content, etag=etag, at=time.time())


async def show_log(
    request: Request,
    about: About,
    *,
    job: Name,
    instance: Annotated[int | None, Query(ge=0)] = None,
    text: Annotated[str, Query(max_length=500)] = "",
    tail: Annotated[int, Query(ge=1, le=MOST_LINES)] = 500,
    cursor: Annotated[str, Query(max_length=60)] = "",
) -> Response:
    """Answer the last lines of a job's log, of all instances or one, or with a cursor what came after it."""
    kept = about.kept
    digest = await kept.clients.digest(about.conn_id)
    run = await _readable_run(about, digest, job)
    part = await kept.logs.follower(digest, run).read(cursor, instance=instance, text=text, tail=tail)
    return await json_answer(request, lambda: part)


async def download_log(
    about: About,
    job: Name,
    instance: Annotated[int | None, Query(ge=0)] = None,
    text: Annotated[str, Query(max_length=500)] = "",
) -> Response:
    """Answer the whole log of a job as a text file."""
    kept = about.kept
    digest = await kept.clients.digest(about.conn_id)
    run = await _readable_run(about, digest, job)
    user_id = str(about.user.get_id())
    if kept.downloads.total() >= MOST_DOWNLOADS or kept.downloads[user_id] >= MOST_DOWNLOADS_OF_USER:
        most = f"at most {MOST_DOWNLOADS} at a time, and {MOST_DOWNLOADS_OF_USER} of a user"
        return error_answer(503, f"Too many logs are being downloaded now: {most}. Try again in a minute.")

    async def content() -> AsyncGenerator[bytes, None]:
        with kept.downloading(user_id):
            async with (
                kept.clients.open(digest) as client,
                aclosing(whole_log(client, run, instance=instance, text=text)) as chunks,
            ):
                async for chunk in chunks:
                    yield chunk

    whole = content()
    first = await anext(whole)  # so that an error is an answer, not a file that breaks off

    async def with_first() -> AsyncGenerator[bytes, None]:
        async with aclosing(whole):
            yield first
            async for chunk in whole:
                yield chunk

    named = f"attachment; filename*=UTF-8''{quote(job, safe='')}.log"
    return LogDownload(with_first(), headers={"Content-Disposition": named})


async def act(request: Request, action: str) -> Response:
    """Do what a button says, and answer what came of it, in words; of the policy, its plan, too."""
    if action not in actions.ACTIONS:
        return error_answer(404, f"There is no action {action!r}; there are {', '.join(actions.ACTIONS)}.")
    if problem := forged(request):
        return error_answer(403, problem)
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY:
            return error_answer(413, f"The body has more than {MOST_BODY} bytes.")
    try:
        asked = msgspec.json.decode(body, type=actions.ACTIONS[action])
    except msgspec.DecodeError as error:
        return error_answer(422, f"The body is no request: {error}.")
    result = await actions.act(action, asked, request.state.edl_user)
    kept = kept_of(request)
    kept.reader(asked.conn).read_now()
    plan = None
    if result.outcome:
        _, view = await Asked(kept, request.state.edl_user, asked.conn, TaskKey()).view()
        plan = await asyncio.to_thread(view.plan, result.outcome)
    return await json_answer(request, lambda: {"done": result.done, "plan": plan})


async def _removed(about: Asked, seen: Seen, scope: Scope) -> tuple[str, ...]:
    """Return the jobs and pools of this task or run that were removed, as they are at their ends; their logs stay."""
    links = tuple(link for link in scope.links if link.conn_id == about.conn_id and link.name not in seen.jobs)
    if not links:
        return ()

    async def ask() -> tuple[str, ...]:
        found = []
        async with about.kept.clients.open(seen.digest) as client:
            for link in links[:MOST_REMOVED]:
                # one that was never started has no owner; of a backend that is away, others tell
                with suppress(EdlError):
                    if await client.backend.owner(link.name) == owner(link.task):
                        found.append(link.name)
        return tuple(dict.fromkeys(found))

    return await about.kept.removed.get((seen.digest, links), ask, holds_s=viewers.SCOPE_HOLDS_S)


async def _visible(about: Asked, scope: Scope, removed: Mapping[str, Life]) -> dict[str, Life]:
    """Return those of the removed jobs that the user may see, of this scope."""
    dags = {dag_of(life.owner) for life in removed.values()}
    rights = await about.kept.rights.of(about.user, dags, about.conn_id)
    return {
        name: life
        for name, life in removed.items()
        if dag_of(life.owner) in rights.sees and (scope.is_all or life.owner in scope.owners)
    }


async def _life(past: PastReader, client: EdlClient, run: JobRun) -> Life | None:
    """Return from when to when what is kept by a run's name is its owner's, None if that is unknown."""
    if run.created_at or run.has_own_name:
        return Life(owner=run.owner, since=run.since)
    await past.points(client)
    life = await past.removed_job(client, run.job)
    return life if life and life.owner == run.owner else None


class _OnJob(msgspec.Struct, frozen=True):
    sees: bool
    reads_log: bool


async def _rights_on(about: Asked, client: EdlClient, job: str) -> tuple[JobRun, _OnJob]:
    """Return a job's last run, also if it was removed, and the user's rights on it, now. Raises UnknownJobError."""
    run = await run_of(client, job)
    dag_id = dag_of(run.owner)
    rights = await asyncio.to_thread(access.rights_of, about.user, {dag_id}, about.conn_id)
    return run, _OnJob(dag_id in rights.sees, dag_id in rights.reads_log)


async def _readable_run(about: Asked, digest: str, job: str) -> JobRun:
    async with about.kept.clients.open(digest) as client:
        run, rights = await _rights_on(about, client, job)
    if not rights.reads_log:
        raise DeniedError
    return run


def _in_time(answer: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Give up what takes longer than LONGEST_S, such as a cluster that takes connections and says nothing."""

    @wraps(answer)
    async def within(*args: Any, **given: Any) -> Response:
        try:
            async with asyncio.timeout(LONGEST_S) as limit:
                return await answer(*args, **given)
        except TimeoutError:
            if not limit.expired():
                raise
            raise SilentBackendError(f"The backend has not answered within {LONGEST_S:g} s") from None

    return within


def _file(name: str) -> bytes | None:
    if "/" in name or name.startswith("."):
        return None
    with suppress(OSError, ValueError):  # the latter for a NUL
        return (STATIC / name).read_bytes()
    return None
