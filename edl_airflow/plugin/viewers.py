"""What all viewers of this process share, and what one of them asks about."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import compress
from typing import Annotated, Any, TypeVar

import msgspec
import structlog
from fastapi import Depends, Query, Request

from edl_airflow.hooks.edl import DEFAULT_CONN_ID
from edl_airflow.plugin import access, airflow_state
from edl_airflow.plugin.access import RightsCache
from edl_airflow.plugin.airflow_state import TaskKey
from edl_airflow.plugin.clients import Clients
from edl_airflow.plugin.live import LiveReader, Seen
from edl_airflow.plugin.log_tail import LogFollowers
from edl_airflow.plugin.past import PastReader
from edl_airflow.plugin.rights import Rights
from edl_airflow.plugin.shared_answers import SharedAnswers
from edl_airflow.plugin.views import Scope, View, dags_in
from edl_runtime.errors import BackendError

MOST_CONNECTIONS = 50
MOST_TRIED = 10
"""Connections that a user may not read in Airflow in which jobs are looked for that they see."""

TRIED_S = 2.0
LISTED_HOLDS_S = 60.0
MOST_LISTED = 1_000
MOST_ANSWERS = 64
CONNECTIONS_HOLD_S = 30.0
LOGGED_EACH_S = 60.0
SCOPE_HOLDS_S = 5.0
ANSWER_WITHIN_S = 10.0
"""How long a request waits for the first state of a connection."""

Key = TypeVar("Key")
Value = TypeVar("Value")

log = structlog.get_logger(__name__)


class DeniedError(Exception):
    """Raised when the user may not see something, or it does not exist, as names are not public either."""


class SilentBackendError(BackendError, ConnectionError):
    """Raised when a backend has not answered in time, as a cluster that is away; its client tries for minutes."""


class Kept:
    """What all viewers of this process share. Readers belong to an event loop, so another loop gets its own."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.rights = RightsCache()
        self.clients = Clients()
        self.logs = LogFollowers(self.clients)
        self.downloads = Counter[str]()
        self._readers: OrderedDict[str, LiveReader] = OrderedDict()
        self._past: OrderedDict[str, PastReader] = OrderedDict()
        self.answers = SharedAnswers[tuple[Any, ...], tuple[str, bytes]](MOST_ANSWERS)
        self._conns = SharedAnswers[None, list[str]](1)
        self._scopes = SharedAnswers[TaskKey, Scope](MOST_ANSWERS)
        self._listed = SharedAnswers[str, list[str]](MOST_LISTED)
        self.removed = SharedAnswers[tuple[str, tuple[airflow_state.JobLink, ...]], tuple[str, ...]](MOST_ANSWERS)
        self._logged: OrderedDict[str, float] = OrderedDict()

    async def seen(self, conn_id: str) -> Seen:
        """Return a connection's state. Raises as `Clients.digest` and `LiveReader.seen`.

        It is looked up first: names that are none take no reader's place.
        """
        digest = await self.clients.digest(conn_id)
        return await self.reader(conn_id).seen(digest)

    def reader(self, conn_id: str) -> LiveReader:
        """Return the reader of a connection that was looked up; one that loses its place to it ends."""
        found = self._readers.get(conn_id) or LiveReader(conn_id, self.clients)
        self._readers[conn_id] = found
        self._readers.move_to_end(conn_id)
        while len(self._readers) > MOST_CONNECTIONS:
            self._readers.popitem(last=False)[1].close()
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
                return not (await Asked(self, user, conn_id, TaskKey()).view())[1].is_empty
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


def kept_of(request: Request) -> Kept:
    """Return what is kept for all viewers, in this event loop."""
    state = request.app.state
    kept: Kept | None = getattr(state, "edl", None)
    if kept is None or kept.loop is not asyncio.get_running_loop():
        kept = state.edl = Kept()
    return kept


class Asked(msgspec.Struct, frozen=True):
    """A request: who asks, about which connection and which part of it."""

    kept: Kept
    user: Any
    conn_id: str
    task: TaskKey

    async def view(self) -> tuple[Seen, View]:
        """Return the connection's state, and what the user sees of it. Raises DeniedError for a hidden DAG."""
        seen, rights, scope = await self.parts()
        return seen, await asyncio.to_thread(View, seen, rights, scope)

    async def parts(self, nothing: Seen | None = None) -> tuple[Seen, Rights, Scope]:
        """Return what a view is made of. Raises DeniedError without a connection, unless `nothing` is then seen."""
        seen = await self._seen() if self.conn_id else nothing
        if seen is None:
            raise DeniedError
        scope = await self.kept.scope(self.task)
        dags = dags_in(seen) | ({scope.task.dag_id} if scope.task.dag_id else set())
        rights = await self.kept.rights.of(self.user, dags, self.conn_id)
        if scope.task.dag_id and scope.task.dag_id not in rights.sees:
            raise DeniedError
        return seen, rights, scope

    async def _seen(self) -> Seen:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await self.kept.seen(self.conn_id)
        except TimeoutError:
            raise SilentBackendError(
                f"The backend of {self.conn_id} has not answered within {ANSWER_WITHIN_S:g} s; it is asked further"
            ) from None


async def _asked(
    request: Request,
    *,
    conn: Annotated[str, Query(max_length=250)] = "",
    dag_id: Annotated[str, Query(max_length=250)] = "",
    run_id: Annotated[str, Query(max_length=250)] = "",
    task_id: Annotated[str, Query(max_length=250)] = "",
    map_index: Annotated[str, Query(max_length=20)] = "",
) -> Asked:
    kept = kept_of(request)
    # Airflow leaves "{MAP_INDEX}" for unmapped tasks; none has an index of more digits
    index = int(map_index) if map_index.isdecimal() and len(map_index) < 10 else -1
    task = TaskKey(dag_id=dag_id, run_id=run_id, task_id=task_id, map_index=index) if dag_id else TaskKey()
    user = request.state.edl_user
    return Asked(kept, user, conn or await _connection_of(kept, user, task), task)


async def _connection_of(kept: Kept, user: Any, task: TaskKey) -> str:
    """Return the connection in which a task or run has started jobs, empty if in none.

    Without a task it is the first that the user may choose.
    """
    if task.dag_id:
        links = (await kept.scope(task)).links
        return links[0].conn_id if links else ""
    return (await kept.listed(user) or [DEFAULT_CONN_ID])[0]


About = Annotated[Asked, Depends(_asked)]
Name = Annotated[str, Query(max_length=250)]
