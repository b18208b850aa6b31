"""The page and its API, for users who are logged in to Airflow: docs/airflow-ui.md."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
from airflow.sdk import conf
from airflow.sdk.exceptions import AirflowNotFoundException
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse

from edl_airflow.client import EdlClient, open_client
from edl_airflow.hooks.edl import DEFAULT_CONN_ID, EdlHook
from edl_airflow.identity import dag_of
from edl_airflow.plugin import access, actions, airflow_state
from edl_airflow.plugin.access import RightsCache
from edl_airflow.plugin.airflow_state import TaskKey
from edl_airflow.plugin.live import NO_JOBS, LiveReader, Seen, every_s
from edl_airflow.plugin.log_lines import shown_line
from edl_airflow.plugin.log_tail import MOST_LINES, LogFollower, whole_log
from edl_airflow.plugin.past import PastReader, events_of, timeline
from edl_airflow.plugin.rights import Rights
from edl_airflow.plugin.views import Scope, View, dags_in
from edl_runtime.backends.errors import JobEndedError, JobReplacedError, UnknownJobError
from edl_runtime.elastic.errors import NoCheckpointError
from edl_runtime.elastic.rendezvous.redis_store import Event, last_events
from edl_runtime.errors import BackendError, EdlError, SpecError
from edl_runtime.progress import CurvePoint, read_curve
from edl_runtime.registry.drain import drained_members
from edl_runtime.registry.errors import UnknownTeacherError
from edl_runtime.store.errors import RegistryError

STATIC = Path(__file__).parent / "static"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
)

MOST_BODY = 4096
MOST_FOLLOWED = 50
"""Logs that are followed at a time, those that were read first being dropped."""

MOST_CONNECTIONS = 50

MOST_ANSWERS = 64
CURVE_POINTS = 500
EVENTS = 200
CONNECTIONS_HOLD_S = 30.0
SCOPE_HOLDS_S = 5.0

Key = TypeVar("Key")
Value = TypeVar("Value")


class _DeniedError(Exception):
    """Raised when the user may not see something, or it does not exist, as names are not public either."""


class _Kept:
    """What all viewers of this process share. Readers belong to an event loop, so another loop gets its own."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.rights = RightsCache()
        self._readers: OrderedDict[str, LiveReader] = OrderedDict()
        self._past: OrderedDict[str, PastReader] = OrderedDict()
        self._logs: OrderedDict[tuple[str, str], LogFollower] = OrderedDict()
        self.answers: OrderedDict[tuple[Any, ...], tuple[str, bytes]] = OrderedDict()
        self._conns: tuple[float, list[str]] = (-CONNECTIONS_HOLD_S, [])
        self._scopes: OrderedDict[TaskKey, tuple[float, Scope]] = OrderedDict()

    def reader(self, conn_id: str) -> LiveReader:
        found = self._readers.setdefault(conn_id, LiveReader(conn_id))
        self._readers.move_to_end(conn_id)
        trim(self._readers, MOST_CONNECTIONS)  # whatever names are asked for; one that is read ends when it is idle
        return found

    def past(self, conn_id: str) -> PastReader:
        found = self._past.setdefault(conn_id, PastReader())
        self._past.move_to_end(conn_id)
        trim(self._past, MOST_CONNECTIONS)
        return found

    def log(self, conn_id: str, job: str) -> LogFollower:
        """Return the follower of a log, and drop those that nobody reads."""
        key = (conn_id, job)
        for other in [each for each, log in self._logs.items() if each != key and log.is_idle]:
            self._logs.pop(other).close()
        found = self._logs.setdefault(key, LogFollower(conn_id, job))
        self._logs.move_to_end(key)
        while len(self._logs) > MOST_FOLLOWED:
            self._logs.popitem(last=False)[1].close()
        return found

    def forget_log(self, conn_id: str, job: str) -> None:
        """Read a log that has ended again the next time: another run of the job may have begun."""
        self._logs.pop((conn_id, job), None)

    async def connections(self) -> list[str]:
        at, found = self._conns
        if time.monotonic() > at + CONNECTIONS_HOLD_S:
            found = await asyncio.to_thread(airflow_state.edl_connections)
            self._conns = (time.monotonic(), found)
        return found

    async def scope(self, task: TaskKey) -> Scope:
        if not task.dag_id:
            return Scope()
        at, found = self._scopes.get(task, (-SCOPE_HOLDS_S, Scope()))
        if time.monotonic() > at + SCOPE_HOLDS_S:
            owners, state = await asyncio.to_thread(airflow_state.owners_in, task)
            found = Scope(task=task, state=state, owners=owners)
            self._scopes[task] = (time.monotonic(), found)
            trim(self._scopes, MOST_ANSWERS)
        return found


def trim(kept: OrderedDict[Key, Value], most: int) -> None:
    """Drop the oldest entries beyond `most`."""
    while len(kept) > most:
        kept.popitem(last=False)


class _Asked(msgspec.Struct, frozen=True):
    """A request: who asks, about which connection and which part of it."""

    kept: _Kept
    user: Any
    conn_id: str
    task: TaskKey

    async def view(self) -> tuple[Seen, View]:
        """Return the connection's state, and what the user sees of it. Raises _DeniedError for a hidden DAG."""
        seen, rights, scope = await self.parts()
        return seen, View(seen, rights, scope)

    async def parts(self, nothing: Seen | None = None) -> tuple[Seen, Rights, Scope]:
        """Return what a view is made of. Raises _DeniedError without a connection, unless `nothing` is then seen."""
        seen = await self.kept.reader(self.conn_id).seen() if self.conn_id else nothing
        if seen is None:
            raise _DeniedError
        scope = await self.kept.scope(self.task)
        dags = dags_in(seen) | ({scope.task.dag_id} if scope.task.dag_id else set())
        rights = await self.kept.rights.of(self.user, dags, self.conn_id)
        if scope.task.dag_id and scope.task.dag_id not in rights.sees:
            raise _DeniedError
        return seen, rights, scope


def make_app() -> FastAPI:
    """Return the page and its API as an app to be mounted."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for errors, answer in (
        ((_DeniedError, actions.ForbiddenError, UnknownJobError), _denied),
        ((AirflowNotFoundException,), _no_connection),
        ((actions.RefusedError, JobEndedError, JobReplacedError, NoCheckpointError, UnknownTeacherError), _conflict),
        ((SpecError, RequestValidationError), _invalid),
        ((BackendError, RegistryError, EdlError, OSError), _unavailable),
    ):
        for error in errors:
            app.add_exception_handler(error, answer)
    app.middleware("http")(_guard)
    app.get("/")(page)
    app.get("/static/{name}")(static)
    app.get("/api/overview")(overview)
    app.get("/api/job")(show_job)
    app.get("/api/pool")(show_pool)
    app.get("/api/timeline")(show_timeline)
    app.get("/api/log")(show_log)
    app.get("/api/log/download")(download_log)
    app.post("/api/actions/{action}")(act)
    return app


async def page(request: Request) -> Response:
    """The page."""
    return await static(request, "index.html")


async def static(request: Request, name: str) -> Response:
    """A file of the page."""
    content = await asyncio.to_thread(_file, name)
    if content is None:
        return _error(404, "There is no such file.")
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    kind = "text/javascript" if name.endswith(".js") else kind
    return _answer(request, content, kind=kind)


async def _asked(
    request: Request,
    *,
    conn: Annotated[str, Query(max_length=250)] = "",
    dag_id: Annotated[str, Query(max_length=250)] = "",
    run_id: Annotated[str, Query(max_length=250)] = "",
    task_id: Annotated[str, Query(max_length=250)] = "",
    map_index: Annotated[str, Query(max_length=20)] = "",
) -> _Asked:
    kept = _kept(request)
    index = int(map_index) if map_index.isdecimal() else -1  # Airflow leaves "{MAP_INDEX}" for unmapped tasks
    task = TaskKey(dag_id=dag_id, run_id=run_id, task_id=task_id, map_index=index) if dag_id else TaskKey()
    return _Asked(kept, request.state.edl_user, conn or await _connection_of(kept, task), task)


async def _connection_of(kept: _Kept, task: TaskKey) -> str:
    """Return the connection in which a task or run has started jobs, empty if in none; without a task the first."""
    if task.dag_id:
        return await asyncio.to_thread(airflow_state.connection_of, task)
    return (await kept.connections() or [DEFAULT_CONN_ID])[0]


About = Annotated[_Asked, Depends(_asked)]
Name = Annotated[str, Query(max_length=250)]


async def overview(request: Request, about: About) -> Response:
    """All jobs and pools that the user sees, and the cluster."""
    seen, rights, scope = await about.parts(NO_JOBS)
    kept = about.kept
    conns = await kept.connections()
    if about.conn_id and about.conn_id not in conns:
        conns = [*conns, about.conn_id]
    key = (about.conn_id, seen.version, rights, scope)
    if key not in kept.answers:
        found = View(seen, rights, scope).overview(about.conn_id, conns, every_s(len(seen.jobs)))
        kept.answers[key] = _encoded(found)
        trim(kept.answers, MOST_ANSWERS)
    etag, content = kept.answers[key]
    return _answer(request, content, etag=etag, at=seen.snapshot.at)


async def show_job(request: Request, about: About, job: Name) -> Response:
    """One job: its instances, curve and events."""
    seen, view = await about.view()
    line = view.line(job)
    problems = list(seen.problems)
    curve: list[CurvePoint] = []
    events: list[Event] = []
    members: tuple[int, ...] = ()
    async with open_client(await EdlHook(about.conn_id).aedl_connection()) as client:
        rights = await _rights_on(about, client, job)
        if not rights.sees:
            raise _DeniedError
        try:
            curve, found, training = await asyncio.gather(
                read_curve(client.redis, client.namespace, job, most=CURVE_POINTS),
                last_events(client.redis, client.namespace, [job], most=EVENTS),
                client.training(job),
            )
            members, events = training.members if training else (), found[job]
        except RegistryError as error:
            problems.append(str(error))
    status = view.jobs.get(job)
    began = status.created_at if status else 0.0
    return _json(
        request,
        {
            "at": seen.snapshot.at,
            "problems": list(dict.fromkeys(problems)),
            "job": view.job(line) if line else None,
            "instances": view.instances(job, members),
            "last_lines": view.last_lines(job),
            "curve": curve,
            "events": [
                {
                    "at": one.at,
                    "kind": one.kind,
                    "generation": one.generation,
                    "instance": one.instance,
                    "text": shown_line(" ".join(one.line().split()[3:])),
                }
                for one in events
                if one.at >= began
            ],
            "can_log": rights.reads_log,
        },
        at=seen.snapshot.at,
    )


async def show_pool(request: Request, about: About, pool: Name) -> Response:
    """One pool: its teachers and instances."""
    seen, view = await about.view()
    line = view.pool_line(pool)
    if line is None:
        raise _DeniedError
    drained: list[str] = []
    problems = list(seen.problems)
    if line.wanted is None or len(line.members) < line.wanted:  # else others have taken the places of those drained
        try:
            async with open_client(await EdlHook(about.conn_id).aedl_connection()) as client:
                drained = await drained_members(client.redis, client.namespace, pool)
        except RegistryError as error:
            problems.append(str(error))
    found = {
        "at": seen.snapshot.at,
        "problems": list(dict.fromkeys(problems)),
        "pool": view.pool(line),
        "instances": view.instances(pool),
        "drained": drained,
    }
    return _json(request, found, at=seen.snapshot.at)


async def show_timeline(request: Request, about: About, job: Name = "") -> Response:
    """The last day, and what is expected of the next."""
    seen, view = await about.view()
    now = time.time()
    past = about.kept.past(about.conn_id)
    async with open_client(await EdlHook(about.conn_id).aedl_connection()) as client:
        points = await past.points(client)
        removed = await _visible(about, view.scope, await past.owners_of_removed(client, seen.jobs))
        names = view.in_scope() | removed
        names = names & {job} if job else names
        elastic = {name for name, status in seen.jobs.items() if status.elastic}
        events = await events_of(client, names & (elastic | removed))
    found = await asyncio.to_thread(timeline, points, events, seen, names, now)
    return _json(request, found, at=now)


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
    """The log of all instances, or what is new in it."""
    await _check_log(about, job)
    part = await about.kept.log(about.conn_id, job).read(cursor, instance=instance, text=text, tail=tail)
    if part.ended:
        about.kept.forget_log(about.conn_id, job)
    return _json(request, part)


async def download_log(
    about: About,
    job: Name,
    instance: Annotated[int | None, Query(ge=0)] = None,
    text: Annotated[str, Query(max_length=500)] = "",
) -> Response:
    """The whole log as a file."""
    await _check_log(about, job)

    async def content() -> AsyncIterator[bytes]:
        async with open_client(await EdlHook(about.conn_id).aedl_connection()) as client:
            async for line in whole_log(client, job, instance=instance, text=text):
                yield line

    named = f"attachment; filename*=UTF-8''{quote(job, safe='')}.log"
    return StreamingResponse(content(), media_type="text/plain; charset=utf-8", headers={"Content-Disposition": named})


async def act(request: Request, action: str) -> Response:
    """Do what a button says."""
    if action not in actions.ACTIONS:
        return _error(404, f"There is no action {action!r}; there are {', '.join(actions.ACTIONS)}.")
    if problem := forged(request):
        return _error(403, problem)
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY:
            return _error(413, f"The body has more than {MOST_BODY} bytes.")
    try:
        asked = msgspec.json.decode(body, type=actions.ACTIONS[action])
    except msgspec.DecodeError as error:
        return _error(422, f"The body is no request: {error}.")
    result = await actions.act(action, asked, request.state.edl_user)
    kept = _kept(request)
    kept.reader(asked.conn).read_now()
    plan = None
    if result.outcome:
        about = _Asked(kept, request.state.edl_user, asked.conn, TaskKey())
        plan = (await about.view())[1].plan(result.outcome)
    return _json(request, {"done": result.done, "plan": plan})


def forged(request: Request) -> str:
    """Return why a change is not from our page but perhaps from another site, by the user's cookie; else empty."""
    headers = request.headers
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return "Send JSON, with the header Content-Type: application/json."
    if headers.get("x-edl-request") != "1":
        return "Send the header X-EDL-Request: 1."
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return "Changes are allowed from this site's own page only."
    origin = headers.get("origin")
    configured = urlsplit(conf.get("api", "base_url", fallback="")).netloc
    own = {headers.get("host"), headers.get("x-forwarded-host"), configured} - {""}
    if origin is not None and "sec-fetch-site" not in headers and urlsplit(origin).netloc not in own:
        return "Changes are allowed from this site's own page only."
    return ""


async def _visible(about: _Asked, scope: Scope, owners: Mapping[str, str]) -> set[str]:
    """Return those of the removed jobs that the user may see, of this scope. `owners`: by the jobs' names."""
    dags = {dag_of(owner) for owner in owners.values()}
    rights = await about.kept.rights.of(about.user, dags, about.conn_id)
    return {
        name
        for name, owner in owners.items()
        if dag_of(owner) in rights.sees and (scope.is_all or owner in scope.owners)
    }


class _OnJob(msgspec.Struct, frozen=True):
    sees: bool
    reads_log: bool


async def _rights_on(about: _Asked, client: EdlClient, job: str) -> _OnJob:
    """Return the user's rights on a job, now, also if it was removed. Raises UnknownJobError."""
    dag_id = dag_of(await client.backend.owner(job))
    rights = await asyncio.to_thread(access.rights_of, about.user, {dag_id}, about.conn_id)
    return _OnJob(dag_id in rights.sees, dag_id in rights.reads_log)


async def _check_log(about: _Asked, job: str) -> None:
    async with open_client(await EdlHook(about.conn_id).aedl_connection()) as client:
        if not (await _rights_on(about, client, job)).reads_log:
            raise _DeniedError


def _kept(request: Request) -> _Kept:
    state = request.app.state
    kept: _Kept | None = getattr(state, "edl", None)
    if kept is None or kept.loop is not asyncio.get_running_loop():
        kept = state.edl = _Kept()
    return kept


def _file(name: str) -> bytes | None:
    if "/" in name or name.startswith("."):
        return None
    with suppress(OSError):
        return (STATIC / name).read_bytes()
    return None


def _json(request: Request, found: Any, *, at: float = 0.0) -> Response:
    etag, content = _encoded(found)
    return _answer(request, content, etag=etag, at=at)


def _encoded(found: Any) -> tuple[str, bytes]:
    """Return an answer and its tag, which is the same while nothing but `at` has changed."""
    content = msgspec.json.encode(found)
    tagged = content
    if isinstance(found, dict) and "at" in found:
        tagged = content.replace(b'"at":' + msgspec.json.encode(found["at"]), b"", 1)
    return hashlib.blake2b(tagged, digest_size=12).hexdigest(), content


def _answer(
    request: Request, content: bytes, *, etag: str = "", kind: str = "application/json", at: float = 0.0
) -> Response:
    tag = f'"{etag or hashlib.blake2b(content, digest_size=12).hexdigest()}"'
    headers = {"ETag": tag}
    if at:
        headers["X-EDL-At"] = f"{at:.3f}"
    # a proxy that compresses makes a tag weak
    if tag in [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


def _error(status: int, text: str) -> Response:
    return Response(msgspec.json.encode({"error": text}), status, media_type="application/json")


async def _denied(_: Request, __: Exception) -> Response:
    return _error(403, "It does not exist, or you have no permission for the DAG that it is of.")


async def _no_connection(_: Request, __: Exception) -> Response:
    """Reveal nothing about connections of other types, not even that they exist."""
    return _error(404, "There is no such connection of type edl.")


async def _conflict(_: Request, error: Exception) -> Response:
    return _error(409, str(error))


async def _invalid(_: Request, error: Exception) -> Response:
    if isinstance(error, SpecError):
        return _error(404 if error.field.startswith("connection") else 422, _spec_text(error))
    wrong = [str(each["loc"][-1]) for each in error.errors()] if isinstance(error, RequestValidationError) else []
    return _error(422, f"Not allowed: {', '.join(wrong)}.")


def _spec_text(error: SpecError) -> str:
    return "There is no such connection of type edl." if error.field.startswith("connection") else str(error)


async def _unavailable(_: Request, error: Exception) -> Response:
    return _error(503, str(error))


async def _guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse every request of users who are not logged in."""
    request.state.edl_user = await access.user_of(request)
    if request.state.edl_user is None:
        response: Response = _error(401, "Log in to Airflow first.")
    else:
        response = await call_next(request)
    response.headers["Content-Security-Policy"] = POLICY
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "same-origin"
    response.headers["Cache-Control"] = "private, no-cache"
    return response
