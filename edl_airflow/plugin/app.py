"""The page and its API, for users who are logged in to Airflow: docs/how-to/airflow-ui.md."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from functools import wraps
from itertools import compress
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
import structlog
from airflow.sdk import conf
from airflow.sdk.exceptions import AirflowNotFoundException
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse

from edl_airflow.client import EdlClient
from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.identity import dag_of, owner
from edl_airflow.plugin import access, actions, airflow_state
from edl_airflow.plugin.access import RightsCache
from edl_airflow.plugin.airflow_state import TaskKey
from edl_airflow.plugin.clients import Clients
from edl_airflow.plugin.live import NO_JOBS, LiveReader, Seen, every_s
from edl_airflow.plugin.log_tail import MOST_LINES, LogFollowers, whole_log
from edl_airflow.plugin.past import Life, PastReader, events_of, life_of, timeline
from edl_airflow.plugin.rights import Rights
from edl_airflow.plugin.runs import JobRun, run_of
from edl_airflow.plugin.shared_answers import SharedAnswers
from edl_airflow.plugin.views import Scope, View, dags_in, plain_problem
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
MOST_DOWNLOADS = 8
"""Logs that are downloaded at a time."""

MOST_DOWNLOADS_OF_USER = 2
"""Of them, so that a user whose clients read slowly leaves some to others."""

MOST_CONNECTIONS = 50

MOST_TRIED = 10
"""Connections that a user may not read in Airflow in which jobs are looked for that they see."""

TRIED_S = 2.0
LISTED_HOLDS_S = 60.0
MOST_LISTED = 1_000

NO_CONNECTION = (
    "There is no such connection of type edl. Add one in Airflow, under Admin, Connections: edl_default is the one "
    "that tasks use unless they name another."
)

MOST_REMOVED = 50
"""Removed jobs and pools of a run that its tab offers."""

MOST_ANSWERS = 64
CURVE_POINTS = 500
EVENTS = 200
ANSWER_WITHIN_S = 10.0
"""How long a request waits for the first state of a connection."""

LONGEST_S = 20.0
"""How long any question may take: less than the page waits, so that it says what is away and polls don't pile up."""

CONNECTIONS_HOLD_S = 30.0
LOGGED_EACH_S = 60.0
SCOPE_HOLDS_S = 5.0

Key = TypeVar("Key")
Value = TypeVar("Value")

log = structlog.get_logger(__name__)


class _DeniedError(Exception):
    """Raised when the user may not see something, or it does not exist, as names are not public either."""


class _SilentBackendError(BackendError, ConnectionError):
    """Raised when a backend has not answered in time, as a cluster that is away; its client tries for minutes."""


class _Kept:
    """What all viewers of this process share. Readers belong to an event loop, so another loop gets its own."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.rights = RightsCache()
        self.clients = Clients()
        self.logs = LogFollowers(self.clients)
        self.downloads = Counter[str]()
        self._readers: OrderedDict[str, LiveReader] = OrderedDict()
        self._past: OrderedDict[str, PastReader] = OrderedDict()
        self.answers: OrderedDict[tuple[Any, ...], tuple[str, bytes]] = OrderedDict()
        self._conns = SharedAnswers[None, list[str]](1)
        self._scopes = SharedAnswers[TaskKey, Scope](MOST_ANSWERS)
        self._listed = SharedAnswers[str, list[str]](MOST_LISTED)
        self.removed = SharedAnswers[tuple[str, tuple[airflow_state.JobLink, ...]], tuple[str, ...]](MOST_ANSWERS)
        self._logged: OrderedDict[str, float] = OrderedDict()

    def reader(self, conn_id: str) -> LiveReader:
        found = self._readers.setdefault(conn_id, LiveReader(conn_id, self.clients))
        self._readers.move_to_end(conn_id)
        trim(self._readers, MOST_CONNECTIONS)  # whatever names are asked for; one that is read ends when it is idle
        return found

    def past(self, digest: str) -> PastReader:
        found = self._past.setdefault(digest, PastReader())
        self._past.move_to_end(digest)
        trim(self._past, MOST_CONNECTIONS)
        return found

    @contextmanager
    def downloading(self, user_id: str) -> Iterator[None]:
        """Count a download of this user."""
        self.downloads[user_id] += 1
        try:
            yield
        finally:
            self.downloads -= Counter((user_id,))  # without those that have none

    def log(self, error: Exception, path: str) -> None:
        """Log an error that nobody has thought of, of each kind once a minute: each page asks again and again."""
        what, now = f"{type(error).__name__} {path}", time.monotonic()
        if now > self._logged.get(what, -LOGGED_EACH_S) + LOGGED_EACH_S:
            log.error("page.not_answered", path=path, exc_info=error)
            self._logged[what] = now
            trim(self._logged, MOST_LISTED)

    async def connections(self) -> list[str]:
        return await self._conns.get(
            None, lambda: asyncio.to_thread(airflow_state.edl_connections), holds_s=CONNECTIONS_HOLD_S
        )

    async def listed(self, user: Any) -> list[str]:
        """Return the connections that a user may read in Airflow, and of the others those where they see something."""
        return await self._listed.get(str(user.get_id()), lambda: self._list(user), holds_s=LISTED_HOLDS_S)

    async def _list(self, user: Any) -> list[str]:
        conns = await self.connections()
        may_read = await asyncio.to_thread(access.readable_connections, user, conns)
        tried = [conn_id for conn_id in conns if conn_id not in may_read][:MOST_TRIED]
        sees = await asyncio.gather(*(self._sees_something(user, conn_id) for conn_id in tried))
        shown = may_read.union(compress(tried, sees))
        return [conn_id for conn_id in conns if conn_id in shown]

    async def _sees_something(self, user: Any, conn_id: str) -> bool:
        with suppress(Exception):  # said to who asks for that connection
            async with asyncio.timeout(TRIED_S):
                return not (await _Asked(self, user, conn_id, TaskKey()).view())[1].is_empty
        return False

    async def scope(self, task: TaskKey) -> Scope:
        if not task.dag_id:
            return Scope()
        return await self._scopes.get(task, lambda: asyncio.to_thread(_scope_of, task), holds_s=SCOPE_HOLDS_S)


def _scope_of(task: TaskKey) -> Scope:
    owners, state = airflow_state.owners_in(task)
    return Scope(task=task, state=state, owners=owners, links=airflow_state.links_in(task))


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
        seen = await self._seen() if self.conn_id else nothing
        if seen is None:
            raise _DeniedError
        scope = await self.kept.scope(self.task)
        dags = dags_in(seen) | ({scope.task.dag_id} if scope.task.dag_id else set())
        rights = await self.kept.rights.of(self.user, dags, self.conn_id)
        if scope.task.dag_id and scope.task.dag_id not in rights.sees:
            raise _DeniedError
        return seen, rights, scope

    async def _seen(self) -> Seen:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await self.kept.reader(self.conn_id).seen()
        except TimeoutError:
            raise _SilentBackendError(
                f"The backend of {self.conn_id} has not answered within {ANSWER_WITHIN_S:g} s; it is asked further"
            ) from None


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
    # Airflow leaves "{MAP_INDEX}" for unmapped tasks; none has an index of more digits
    index = int(map_index) if map_index.isdecimal() and len(map_index) < 10 else -1
    task = TaskKey(dag_id=dag_id, run_id=run_id, task_id=task_id, map_index=index) if dag_id else TaskKey()
    user = request.state.edl_user
    return _Asked(kept, user, conn or await _connection_of(kept, user, task), task)


async def _connection_of(kept: _Kept, user: Any, task: TaskKey) -> str:
    """Return the connection in which a task or run has started jobs, empty if in none.

    Without a task it is the first that the user may choose.
    """
    if task.dag_id:
        links = (await kept.scope(task)).links
        return links[0].conn_id if links else ""
    return (await kept.listed(user) or [DEFAULT_CONN_ID])[0]


About = Annotated[_Asked, Depends(_asked)]
Name = Annotated[str, Query(max_length=250)]


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
    key = (about.conn_id, seen.version, rights, scope, tuple(conns), removed)
    if key not in kept.answers:
        found = View(seen, rights, scope).overview(about.conn_id, conns, every_s(len(seen.jobs)), removed)
        kept.answers[key] = _encoded(found)
        trim(kept.answers, MOST_ANSWERS)
    etag, content = kept.answers[key]
    return _answer(request, content, etag=etag, at=seen.snapshot.at)


async def show_job(request: Request, about: About, job: Name) -> Response:
    """Answer one job with its instances, curve and events; `job` is null once it was removed."""
    seen, view = await about.view()
    line = view.line(job)
    problems = view.problems()
    curve: list[CurvePoint] = []
    events: list[Event] = []
    members: tuple[int, ...] = ()
    async with about.kept.clients.open(seen.digest) as client:
        run, rights = await _rights_on(about, client, job)
        if not rights.sees:
            raise _DeniedError
        try:
            life = await _life(about.kept.past(seen.digest), client, run)
            curve, found, training = await asyncio.gather(
                read_curve(client.redis, client.namespace, job, most=CURVE_POINTS),
                last_events(client.redis, client.namespace, [job], most=EVENTS),
                client.training(job),
            )
            members = training.members if training else ()
            curve = [point for point in curve if life and life.has(point.at)]
            events = [one for one in found[job] if life and life.has(one.at) and one.at >= run.created_at]
        except RegistryError as error:
            problems = view.problems(error)
    return _json(
        request,
        {
            "at": seen.snapshot.at,
            "problems": problems,
            "job": view.job(line) if line else None,
            "instances": view.instances(job, members),
            "last_lines": view.last_lines(job),
            "curve": curve,
            "events": view.events(job, events),
            "can_log": rights.reads_log,
        },
        at=seen.snapshot.at,
    )


async def show_pool(request: Request, about: About, pool: Name) -> Response:
    """Answer one pool with its teachers and instances, and the drained teachers that may be undrained."""
    seen, view = await about.view()
    line = view.pool_line(pool)
    if line is None:
        raise _DeniedError
    drained: list[str] = []
    problems = view.problems()
    if line.wanted is None or len(line.members) < line.wanted:  # else others have taken the places of those drained
        try:
            async with about.kept.clients.open(seen.digest) as client:
                drained = await drained_members(client.redis, client.namespace, pool)
        except RegistryError as error:
            problems = view.problems(error)
    found = {
        "at": seen.snapshot.at,
        "problems": problems,
        "pool": view.pool(line),
        "instances": view.instances(pool),
        "drained": drained,
    }
    return _json(request, found, at=seen.snapshot.at)


async def show_timeline(request: Request, about: About, job: Name = "") -> Response:
    """Answer the last day of the jobs and pools that the user sees, or of one, and what is expected of the next.

    Windows and traffic are for those who may see the cluster's activity.
    """
    seen, rights, scope = await about.parts()
    view = View(seen, rights, scope)
    kept = about.kept
    past = kept.past(seen.digest)
    async with kept.clients.open(seen.digest) as client:
        points = await past.points(client)
        lives = {name: life_of(seen.jobs[name]) for name in view.in_scope() & seen.jobs.keys()}
        lives |= await _visible(about, view.scope, await past.removed(client, seen.jobs))
        lives = {name: life for name, life in lives.items() if name == job or not job}
        decided_at = seen.done.plan.at if seen.done else 0.0
        key = (
            seen.digest,
            past.version,
            decided_at,
            rights,
            frozenset((name, life.since) for name, life in lives.items()),
        )
        if key not in kept.answers:
            now = time.time()
            there = {name for name, status in seen.jobs.items() if not status.elastic}
            events = await events_of(client, {name: life for name, life in lives.items() if name not in there})
            found = await asyncio.to_thread(timeline, points, events, seen, lives, now)
            kept.answers[key] = await asyncio.to_thread(lambda: _encoded(view.timeline(found)))
            trim(kept.answers, MOST_ANSWERS)
        etag, content = kept.answers[key]
    return _answer(request, content, etag=etag, at=time.time())


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
    return _json(request, part)


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
        return _error(503, f"Too many logs are being downloaded now: {most}. Try again in a minute.")

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
    headers = {"Content-Disposition": named}
    return StreamingResponse(with_first(), media_type="text/plain; charset=utf-8", headers=headers)


async def act(request: Request, action: str) -> Response:
    """Do what a button says, and answer what came of it, in words; of the policy, its plan, too."""
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
    if origin is not None and "sec-fetch-site" not in headers and origin.partition("://")[2] not in own:
        return "Changes are allowed from this site's own page only."
    return ""


async def _removed(about: _Asked, seen: Seen, scope: Scope) -> tuple[str, ...]:
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

    return await about.kept.removed.get((seen.digest, links), ask, holds_s=SCOPE_HOLDS_S)


async def _visible(about: _Asked, scope: Scope, removed: Mapping[str, Life]) -> dict[str, Life]:
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


async def _rights_on(about: _Asked, client: EdlClient, job: str) -> tuple[JobRun, _OnJob]:
    """Return a job's last run, also if it was removed, and the user's rights on it, now. Raises UnknownJobError."""
    run = await run_of(client, job)
    dag_id = dag_of(run.owner)
    rights = await asyncio.to_thread(access.rights_of, about.user, {dag_id}, about.conn_id)
    return run, _OnJob(dag_id in rights.sees, dag_id in rights.reads_log)


async def _readable_run(about: _Asked, digest: str, job: str) -> JobRun:
    async with about.kept.clients.open(digest) as client:
        run, rights = await _rights_on(about, client, job)
    if not rights.reads_log:
        raise _DeniedError
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
            raise _SilentBackendError(f"The backend has not answered within {LONGEST_S:g} s") from None

    return within


def _kept(request: Request) -> _Kept:
    state = request.app.state
    kept: _Kept | None = getattr(state, "edl", None)
    if kept is None or kept.loop is not asyncio.get_running_loop():
        kept = state.edl = _Kept()
    return kept


def _file(name: str) -> bytes | None:
    if "/" in name or name.startswith("."):
        return None
    with suppress(OSError, ValueError):  # the latter for a NUL
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
    return _error(404, NO_CONNECTION)


async def _conflict(_: Request, error: Exception) -> Response:
    return _error(409, str(error))


async def _invalid(request: Request, error: Exception) -> Response:
    """Say what is wrong with a connection to those who may read it."""
    if isinstance(error, SpecError):
        if not error.field.startswith("connection"):
            return _error(422, str(error))
        conn_id = request.query_params.get("conn") or DEFAULT_CONN_ID
        may_read = await asyncio.to_thread(access.readable_connections, request.state.edl_user, [conn_id])
        is_own = error.field.startswith(f"connection {conn_id!r}")
        return _error(404, str(error)) if may_read and is_own else await _no_connection(request, error)
    wrong = [str(each["loc"][-1]) for each in error.errors()] if isinstance(error, RequestValidationError) else []
    return _error(422, f"Not allowed: {', '.join(wrong)}.")


async def _unavailable(request: Request, error: Exception) -> Response:
    """Name hosts only to those who may see the cluster's activity."""
    rights = await _kept(request).rights.of(request.state.edl_user, (), "")
    return _error(503, str(error) if rights.cluster else plain_problem(error))


async def _guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse every request of users who are not logged in, and answer whatever goes wrong, as in Airflow's database."""
    try:
        request.state.edl_user = await access.user_of(request)
        if request.state.edl_user is None:
            response: Response = _error(401, "Log in to Airflow first.")
        else:
            response = await call_next(request)
    except Exception as error:  # noqa: BLE001 - logged, but not for each poll
        _kept(request).log(error, request.url.path)
        response = _error(503, f"Airflow can't answer now ({type(error).__name__}, see the API server's log).")
    response.headers["Content-Security-Policy"] = POLICY
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "same-origin"
    response.headers["Cache-Control"] = "private, no-cache"
    return response
