"""The Kubernetes API by its few verbs, on plain data: `kubernetes_asyncio`'s client without its models.

Reads and writes that can be repeated are repeated while the API server is away or has too much to do; an outage is
logged once, however many requests wait for it.
"""

from __future__ import annotations

import asyncio
import builtins
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from edl_runtime.backends.errors import (
    BrokenStreamError,
    ClusterError,
    ClusterUnavailableError,
    ConflictError,
    ResourceVersionExpiredError,
)
from edl_runtime.backends.kubernetes.names import MANAGER
from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from kubernetes_asyncio.client import ApiClient

LOG_OUTAGE_AFTER_S = 1.0
"""A server that is back so soon is not worth a line."""

log = get_logger(__name__)

clock = time.monotonic


class Outage:
    """Whether a server is away, for all that its requests have come to know."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._waiting = 0

    @contextmanager
    def waiting(self, address: str) -> Iterator[PendingRequest]:
        """Give what one request to the server at that address tells of its wait for an answer."""
        wait = PendingRequest(self, address)
        try:
            yield wait
        finally:
            self._waiting -= wait.is_logged
            if wait.is_finished:
                self._end_if_idle(address)

    def start(self, since: float, address: str, cause: str) -> None:
        """Know that a request waits, since when and why."""
        self._waiting += 1
        if self._since is None:
            self._since = since
            log.warning("cluster.away", address=address, cause=cause)

    def _end_if_idle(self, address: str) -> None:
        """Know that a request has been answered. The server is back when no other waits any more."""
        if self._since is not None and not self._waiting:
            log.info("cluster.back", address=address, away_s=round(clock() - self._since, 1))
            self._since = None


class PendingRequest:
    """A request that may have to wait for its answer. `is_finished`: it has one."""

    def __init__(self, outage: Outage, address: str) -> None:
        self.is_logged = False
        self.is_finished = False
        self._outage = outage
        self._address = address
        self._began = clock()

    def waited_s(self) -> float:
        return clock() - self._began

    def note_failure(self, cause: str) -> None:
        """Know that there is no answer yet."""
        if not self.is_logged and self.waited_s() >= LOG_OUTAGE_AFTER_S:
            self.is_logged = True
            self._outage.start(self._began, self._address, cause)

    def finish(self) -> None:
        """Know that there is an answer, also one that refuses."""
        self.is_finished = True


Manifest = dict[str, Any]
Answer = TypeVar("Answer")
Kept = TypeVar("Kept")

MAX_OUTAGE_S = 300.0
"""How long a request is repeated to an API server that is away, or says that it has too much to do."""

REQUEST_TIMEOUT_S = 30.0
"""An API server that takes longer over a request is taken for one that is away."""

PAGE_SIZE = 500
"""Objects in one answer to a list of all namespaces."""

MAX_LIST_ATTEMPTS = 3
"""How often a list of all namespaces is begun when the server forgets between two answers where it was."""

WATCH_TIMEOUT_S = 290
"""How long one watch lasts; the next goes on where it ended."""

RETRY_DELAYS_S = (0.2, 5.0)
"""How long to wait before a request is repeated: first, and at most."""

WATCH_SILENCE_S = 90.0
"""A watch that says nothing for so long has lost its connection: the server notes each minute that nothing happened."""

RECONNECT_DELAY_S = 0.5
"""How long to wait before a stream that broke is asked for anew."""

_PATHS = {
    "Pod": ("/api/v1", "pods"),
    "Secret": ("/api/v1", "secrets"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Node": ("/api/v1", "nodes"),
    "Event": ("/api/v1", "events"),
    "ResourceQuota": ("/api/v1", "resourcequotas"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "Job": ("/apis/batch/v1", "jobs"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
}
_BUSY_STATUSES = frozenset({429, 500, 502, 503, 504})
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


class _ServerBusyError(Exception):
    """The server asks for patience."""


class WatchEvent(msgspec.Struct, frozen=True):
    """What a watch tells.

    - `type`: "LISTED", all that there is; "ADDED", "MODIFIED" or "DELETED"; "BOOKMARK", nothing else up to this
      version; "OPENED" and "CLOSED", from when to when the server tells at once what happens.
    - `version`: of the world that is known by now.
    - `objects`: which it is about.
    """

    type: str
    version: str
    objects: builtins.list[Manifest] = []


class _Request(msgspec.Struct, frozen=True):
    method: str
    path: str
    query: Mapping[str, str] = {}
    body: Any = None
    content_type: str = "application/json"
    accept: str = "application/json"
    timeout: Any = None


class _ListMetadata(msgspec.Struct, frozen=True):
    version: str = msgspec.field(name="resourceVersion")
    more: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct, frozen=True):
    metadata: _ListMetadata
    items: list[Manifest]

    def __post_init__(self) -> None:
        """Raise ValueError for what are no objects."""
        for item in self.items:
            _check(item, "name")


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: Manifest

    def __post_init__(self) -> None:
        """Raise ValueError for what is about no object."""
        if self.type != "ERROR":
            _check(self.object, "resourceVersion", *(() if self.type == "BOOKMARK" else ("name",)))


def _check(thing: Manifest, *needed: str) -> None:
    """Raise ValueError for an object whose metadata lack one of these."""
    metadata = thing.get("metadata")
    if not isinstance(metadata, dict) or not all(isinstance(metadata.get(field), str) for field in needed):
        raise ValueError(f"an object without metadata that have {' and '.join(needed)}")


class KubernetesClient:
    """Objects of one namespace. `client` is open already, and stays the caller's to close.

    `renew`: gives it new credentials, for the server has refused those that it has; None if they last long enough.
    `outage`: what all who ask the same server know of its being away.
    """

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        *,
        renew: Callable[[], Awaitable[None]] | None = None,
        outage: Outage | None = None,
    ) -> None:
        self._client = client
        self._renew = renew
        self.namespace = namespace
        self.address: str = client.configuration.host or ""
        self._outage = outage or Outage()

    async def get(self, kind: str, name: str) -> Manifest | None:
        """Return the object, None if there is none."""
        return await self._request_if_found(_Request("GET", self._path(kind, name)))

    async def metadata(self, manifest: Mapping[str, Any]) -> Manifest | None:
        """Return the metadata of what has that kind and name, None if nothing has.

        That takes the verb patch, and so is to be had of Secrets, which we may not get. Metadata are all that is asked
        for here; but a patch's answer is what the object holds, so whoever may patch a Secret can be shown that, too.
        """
        path = self._path(manifest["kind"], manifest["metadata"]["name"])
        query, content_type = {"fieldManager": MANAGER, "dryRun": "All"}, "application/merge-patch+json"
        found = await self._request_if_found(_Request("PATCH", path, query, {}, content_type, _METADATA_ONLY))
        return found["metadata"] if found else None

    async def list(self, kind: str, *, labels: str = "", fields: str = "") -> tuple[list[Manifest], str]:
        """Return the objects and the version of the world that they are of."""
        query = {"labelSelector": labels, "fieldSelector": fields}
        found = await self._request(_Request("GET", self._path(kind), query), _list_decoder)
        return [{**item, "kind": kind} for item in found.items], found.metadata.version

    async def list_all_namespaces(
        self, kind: str, keep: Callable[[Manifest], Kept], *, fields: str = ""
    ) -> builtins.list[Kept]:
        """Return what is to be kept of each object of all namespaces, or that are in none.

        Of a large cluster in several answers, of which no two are there at a time. Raises ResourceVersionExpiredError
        where it takes so long, time and again, that the server forgets where it was.
        """
        for _ in range(MAX_LIST_ATTEMPTS - 1):
            with suppress(ResourceVersionExpiredError):
                return await self._list_pages(kind, keep, fields)
        return await self._list_pages(kind, keep, fields)

    async def _list_pages(self, kind: str, keep: Callable[[Manifest], Kept], fields: str) -> builtins.list[Kept]:
        group, plural = _PATHS[kind]
        query = {"fieldSelector": fields, "limit": str(PAGE_SIZE)}
        kept: list[Kept] = []
        while True:
            found = await self._request(_Request("GET", f"{group}/{plural}", query), _list_decoder)
            kept += map(keep, found.items)
            more = found.metadata.more
            if not more:
                return kept
            del found
            query = {**query, "continue": more}

    async def create(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Manifest:
        """Create the object. Raises ConflictError if it is there.

        `dry_run`, here and below: let the server judge it and change nothing.
        """
        query = {"fieldManager": MANAGER, **_dry_run_query(dry_run=dry_run)}
        return await self._request(_Request("POST", self._path(manifest["kind"]), query, manifest), _decoder)

    async def apply(
        self, manifest: Mapping[str, Any], *, over: Mapping[str, Any] | None = None, dry_run: bool = False
    ) -> Manifest:
        """Make the object what the manifest says (server-side apply).

        `over`: the metadata of what is there. Raises ConflictError if that has changed since, or is gone.
        """
        query = {"fieldManager": MANAGER, "force": "true", **_dry_run_query(dry_run=dry_run)}
        path = self._path(manifest["kind"], manifest["metadata"]["name"])
        exactly = {key: over[key] for key in ("uid", "resourceVersion")} if over else {}
        applied = {**manifest, "metadata": {**manifest["metadata"], **exactly}}
        return await self._request(_Request("PATCH", path, query, applied, "application/apply-patch+yaml"), _decoder)

    async def patch(self, manifest: Mapping[str, Any], change: Mapping[str, Any]) -> Manifest:
        """Change what `change` says of the object (JSON merge patch).

        Raises ConflictError if `change` names a resourceVersion, and it is another by now.
        """
        path = self._path(manifest["kind"], manifest["metadata"]["name"])
        query = {"fieldManager": MANAGER}
        return await self._request(_Request("PATCH", path, query, change, "application/merge-patch+json"), _decoder)

    async def annotate(
        self, owner: Manifest, annotations: Mapping[str, str], spec: Mapping[str, Any] | None = None
    ) -> Manifest:
        """Change its annotations, and of its spec what is given. Raises ConflictError if it has changed since."""
        metadata = {"resourceVersion": owner["metadata"]["resourceVersion"], "annotations": dict(annotations)}
        return await self.patch(owner, {"metadata": metadata, **({"spec": dict(spec)} if spec else {})})

    async def delete(self, manifest: Mapping[str, Any], *, foreground: bool = False, exactly: bool = False) -> None:
        """Delete this object, and no other of its name; `exactly`: only as it is here, or ConflictError.

        `foreground`: it is gone once everything that it owns is. Does nothing if it is gone.
        """
        metadata = manifest["metadata"]
        preconditions = {"uid": metadata["uid"]}
        if exactly:
            preconditions["resourceVersion"] = metadata["resourceVersion"]
        body = {
            "preconditions": preconditions,
            "propagationPolicy": "Foreground" if foreground else "Background",
        }
        try:
            await self._request_if_found(_Request("DELETE", self._path(manifest["kind"], metadata["name"]), {}, body))
        except ConflictError:
            if exactly:
                raise

    async def dry_run_delete(self, manifest: Mapping[str, Any]) -> None:
        """Let the server judge whether what has that kind and name, if anything has, may be deleted."""
        path = self._path(manifest["kind"], manifest["metadata"]["name"])
        await self._request_if_found(_Request("DELETE", path, {"dryRun": "All"}))

    async def dry_run_watch(self, kind: str) -> None:
        """Let the server judge whether that kind may be watched."""
        async with self.stream(self._path(kind), {"watch": "true", "timeoutSeconds": "1"}, silent_s=REQUEST_TIMEOUT_S):
            pass

    async def watch(self, kind: str, *, labels: str = "", fields: str = "") -> AsyncIterator[dict[str, Manifest]]:
        """Yield all objects, by name, at first and after each change: one dict, which is changed in between.

        Never ends.
        """
        objects: dict[str, Manifest] = {}
        async for change in self.changes(kind, labels=labels, fields=fields):
            if change.type == "LISTED":
                objects.clear()
            for thing in change.objects:
                name = thing["metadata"]["name"]
                if change.type == "DELETED":
                    objects.pop(name, None)
                else:
                    objects[name] = thing
            if change.objects or change.type == "LISTED":
                yield objects

    async def changes(self, kind: str, *, labels: str = "", fields: str = "") -> AsyncIterator[WatchEvent]:
        """Yield what happens to objects.

        Lists once and watches from there; lists anew when the server has forgotten where that was. Never ends.
        """
        while True:
            items, version = await self.list(kind, labels=labels, fields=fields)
            yield WatchEvent("LISTED", version, items)
            with suppress(ResourceVersionExpiredError):
                async for change in self._events(kind, labels, fields, version):
                    yield change

    async def _events(self, kind: str, labels: str, fields: str, version: str) -> AsyncIterator[WatchEvent]:
        query = {
            "labelSelector": labels,
            "fieldSelector": fields,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_TIMEOUT_S),
        }
        while True:
            pause_s = 0.0
            try:
                at = {**query, "resourceVersion": version}
                async with self.stream(self._path(kind), at, silent_s=WATCH_SILENCE_S) as response:
                    yield WatchEvent("OPENED", version)
                    async for line, ends in read_lines(response):
                        if not ends:
                            continue
                        event = _decode_body(line, _event_decoder)
                        if event.type == "ERROR":
                            raise _error_for(event.object.get("code", 500), event.object)
                        version = event.object["metadata"]["resourceVersion"]
                        things = [] if event.type == "BOOKMARK" else [{**event.object, "kind": kind}]
                        yield WatchEvent(event.type, version, things)
            except (BrokenStreamError, _ServerBusyError):
                pause_s = RECONNECT_DELAY_S
            yield WatchEvent("CLOSED", version)
            await asyncio.sleep(pause_s)

    @asynccontextmanager
    async def stream(self, path: str, query: Mapping[str, str], *, silent_s: float) -> AsyncIterator[ClientResponse]:
        """Open what a GET returns bit by bit. A connection that breaks while it is read is a BrokenStreamError.

        `silent_s`: for so long it may say nothing.
        """
        import aiohttp

        timeout = aiohttp.ClientTimeout(sock_connect=REQUEST_TIMEOUT_S, sock_read=silent_s)
        response = await self._with_retries(self._open, _Request("GET", path, query, timeout=timeout))
        try:
            yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BrokenStreamError(self.address, str(error) or type(error).__name__) from error
        finally:
            _abort_connection(response)

    def log_path(self, pod: str) -> str:
        return f"{self._path('Pod', pod)}/log"

    def _path(self, kind: str, name: str = "") -> str:
        group, plural = _PATHS[kind]
        return f"{group}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    async def _request_if_found(self, request: _Request) -> Manifest | None:
        """As `_request`, with None for what is not there."""
        try:
            return await self._request(request, _decoder)
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    async def _request(self, request: _Request, decoder: JsonDecoder[Answer]) -> Answer:
        return await self._with_retries(partial(self._answer, decoder), request)

    async def _with_retries(self, ask: Callable[[_Request], Awaitable[Answer]], request: _Request) -> Answer:
        """Return what `ask` does, which is repeated while nobody is there to answer it to the end."""
        import aiohttp

        away = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, OSError, _ServerBusyError)
        pause_s = RETRY_DELAYS_S[0]
        with self._outage.waiting(self.address) as wait:
            while True:
                try:
                    answer = await ask(request)
                except away as error:
                    cause = str(error) or type(error).__name__
                    if wait.waited_s() + pause_s > MAX_OUTAGE_S:
                        raise ClusterUnavailableError(self.address, cause) from error
                    wait.note_failure(cause)
                except ClusterError:
                    wait.finish()
                    raise
                else:
                    wait.finish()
                    return answer
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - to come apart, not to hide
                pause_s = min(2 * pause_s, RETRY_DELAYS_S[1])

    async def _answer(self, decoder: JsonDecoder[Answer], request: _Request) -> Answer:
        async with await self._open(request) as response:
            return _decode_body(await response.read(), decoder)

    async def _open(self, request: _Request) -> ClientResponse:
        response = await self._send(request)
        if response.status == 401 and self._renew:
            response.close()
            await self._renew()
            response = await self._send(request)
        if 200 <= response.status < 300:
            return response
        async with response:
            content = await response.read()
        try:
            answer = _decoder.decode(content)
        except msgspec.DecodeError:
            answer = {"message": content.decode(errors="replace")}
        raise _error_for(response.status, answer)

    async def _send(self, request: _Request) -> ClientResponse:
        response: ClientResponse = await self._client.call_api(
            request.path,
            request.method,
            query_params=[(key, value) for key, value in request.query.items() if value],
            header_params={"Accept": request.accept, "Content-Type": request.content_type},
            body=request.body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=request.timeout or REQUEST_TIMEOUT_S,
        )
        return response


def _abort_connection(response: ClientResponse) -> None:
    """Close the connection at once: a goodbye would still be under way when the event loop is closed."""
    connection = response.connection
    if connection and connection.transport:
        connection.transport.abort()
    response.close()


def _dry_run_query(*, dry_run: bool) -> dict[str, str]:
    return {"dryRun": "All"} if dry_run else {}


def _decode_body(content: bytes, decoder: JsonDecoder[Answer]) -> Answer:
    """Return what a server says. Raises _BusyError for what is none of an API server: it may be a proxy's own page."""
    try:
        return decoder.decode(content)
    except msgspec.DecodeError as error:
        raise _ServerBusyError(f"it answers what no API server does: {content[:80]!r}: {error}") from None


_decoder = JsonDecoder(Manifest)
_list_decoder = JsonDecoder(_List)
_event_decoder = JsonDecoder(_Event)


def _error_for(status: int, answer: Mapping[str, Any]) -> ClusterError | _ServerBusyError:
    if status in _BUSY_STATUSES:
        return _ServerBusyError(f"{status}: {answer.get('message', '')}")
    kinds: dict[int, type[ClusterError]] = {409: ConflictError, 410: ResourceVersionExpiredError}
    return kinds.get(status, ClusterError)(status, answer.get("reason") or "", answer.get("message") or "")


async def read_lines(response: ClientResponse, longest: int = 1 << 26) -> AsyncIterator[tuple[bytes, bool]]:
    """Yield a response's lines, each with whether it has its end, which is left out: the last one may have none.

    A line of more than `longest` bytes comes in parts of so many, always the same; only the last has the line's end.
    What there is of a line when the connection breaks comes before the error.
    """
    rest = b""
    try:
        async for block in response.content.iter_any():
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                parts = _split_long(line, longest)
                for part in parts[:-1]:
                    yield part, False
                yield parts[-1], True
            *parts, rest = _split_long(rest, longest)
            for part in parts:
                yield part, False
    except Exception:
        if rest:
            yield rest, False
        raise
    if rest:
        yield rest, False


def _split_long(line: bytes, longest: int) -> builtins.list[bytes]:
    return [line[at : at + longest] for at in range(0, len(line), longest)] or [b""]
