"""A client of the Kubernetes API on plain data: `kubernetes_asyncio`'s client without its models.

Requests are repeated while the API server is away or busy; an outage is logged once for all of them.
"""

from __future__ import annotations

import asyncio
import builtins
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from edl_runtime.backends.errors import (
    BrokenStreamError,
    ClusterError,
    ClusterUnavailableError,
    ConflictError,
    ResourceVersionExpiredError,
)
from edl_runtime.backends.kubernetes.names import MANAGER
from edl_runtime.errors import UnexpectedError, isolated
from edl_runtime.log import get_logger
from edl_runtime.parsing import JsonDecoder

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from kubernetes_asyncio.client import ApiClient

LOG_OUTAGE_AFTER_S = 1.0
"""Shorter outages are not logged."""

log = get_logger(__name__)

clock = time.monotonic


class Outage:
    """Logs when a server is away and when it is back, once for all requests that wait for it."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._waiting = 0

    def add(self, since: float, address: str, cause: str) -> None:
        """Count a request that waits for its response."""
        self._waiting += 1
        if self._since is None:
            self._since = since
            log.warning("cluster.away", address=address, cause=cause)

    def remove(self, address: str, *, was_added: bool, is_answered: bool) -> None:
        """Count a request out. The server is back when one was answered and no other waits."""
        self._waiting -= was_added
        if is_answered and self._since is not None and not self._waiting:
            log.info("cluster.back", address=address, away_s=round(clock() - self._since, 1))
            self._since = None


Manifest = dict[str, Any]
Answer = TypeVar("Answer")
Decoded_co = TypeVar("Decoded_co", covariant=True)
Read = Callable[[bytes], Manifest]
"""Returns what is kept of an object in JSON. Raises msgspec.DecodeError."""

MAX_OUTAGE_S = 300.0
"""How long a request is repeated while the API server is away or busy."""

REQUEST_TIMEOUT_S = 30.0
"""An API server that takes longer counts as away."""

PAGE_SIZE = 500
"""Objects in one page of a list of all namespaces."""

MAX_LIST_ATTEMPTS = 3
"""How often a list of all namespaces is begun when its resourceVersion expires between two pages."""

WATCH_TIMEOUT_S = 290
"""How long one watch lasts; the next continues at its resourceVersion."""

RETRY_DELAYS_S = (0.2, 5.0)
"""Delays before a request is repeated: the first, and the longest."""

WATCH_SILENCE_S = 90.0
"""A watch without events for so long has lost its connection: the server sends a bookmark each minute."""

RECONNECT_DELAY_S = 0.5
"""Delay before a broken stream is opened again."""

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
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "TrainingJob": ("/apis/paddlepaddle.org/v1", "trainingjobs"),
    "Workload": ("/apis/kueue.x-k8s.io/v1beta2", "workloads"),
}
UNREADABLE = frozenset({403, 404})
"""Statuses for lists of a kind that this account may not read, or that the cluster does not have."""

_BUSY_STATUSES = frozenset({429, 500, 502, 503, 504})
_DRY_RUN = {"dryRun": "All"}
_TEST_FAILED = "the server rejected our request due to an error in our request"
"""What the API server says when a test of a JSON patch has failed."""

_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


def _path_of(annotation: str) -> str:
    """Return the path of an annotation in a JSON patch."""
    return f"/metadata/annotations/{annotation.replace('/', '~1')}"


class _ServerBusyError(Exception):
    """The server is busy (429 or 5xx), or a proxy answers for it."""


class WatchEvent(msgspec.Struct, frozen=True):
    """An event of a watch.

    - `type`: "LISTED" with all objects; "ADDED", "MODIFIED" or "DELETED"; "BOOKMARK": no other changes
      up to this version; "OPENED" and "CLOSED": between them, the server reports changes at once.
    - `version`: the resourceVersion up to which changes are known.
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


class _Decoder(Protocol[Decoded_co]):
    def decode(self, content: bytes | bytearray) -> Decoded_co: ...


class _ListMetadata(msgspec.Struct, frozen=True):
    version: str = msgspec.field(name="resourceVersion")
    more: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct, frozen=True):
    metadata: _ListMetadata
    items: list[msgspec.Raw]


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


def read_whole(content: bytes) -> Manifest:
    """Return the object without who has set which field: nobody reads that."""
    thing = _decoder.decode(content)
    metadata = thing.get("metadata")
    if isinstance(metadata, dict):
        metadata.pop("managedFields", None)
    return thing


def _checked(thing: Manifest, *needed: str) -> Manifest:
    """Return the object. Raises msgspec.DecodeError if it is without these metadata."""
    metadata = thing.get("metadata")
    if not isinstance(metadata, dict) or not all(isinstance(metadata.get(field), str) for field in needed):
        raise msgspec.DecodeError(f"an object without {' and '.join(needed)} in its metadata")
    return thing


class _ListDecoder:
    """Decodes a list of a kind object by object, so that no more of them is in memory than what `read` returns."""

    def __init__(self, kind: str, read: Read) -> None:
        self._kind = kind
        self._read = read

    def decode(self, content: bytes | bytearray) -> tuple[builtins.list[Manifest], _ListMetadata]:
        """Return what is kept of the objects that can be read. Raises msgspec.DecodeError."""
        found = _list_decoder.decode(content)
        kept = (_kept(self._kind, self._read, item) for item in found.items)
        items = [_checked(thing, "name") for thing in kept if thing is not None]
        for item in items:
            item["kind"] = self._kind
        return items, found.metadata


class _EventDecoder:
    """Decodes an event of a watch of a kind to its type and what `read` returns of its object."""

    def __init__(self, kind: str, read: Read) -> None:
        self._kind = kind
        self._read = read

    def decode(self, content: bytes | bytearray) -> tuple[str, Manifest]:
        """Return both; of an error, its status. An object that can't be read any more counts as deleted.

        Raises msgspec.DecodeError.
        """
        event = _event_decoder.decode(content)
        if event.type == "ERROR":
            return event.type, _decoder.decode(event.object)
        if event.type == "BOOKMARK":
            return event.type, _checked(_decoder.decode(event.object), "resourceVersion")
        kept = _kept(self._kind, self._read, event.object)
        what = event.type if kept is not None else "DELETED"  # as it is now nobody can know it
        thing = _checked(_decoder.decode(event.object) if kept is None else kept, "resourceVersion", "name")
        return what, {**thing, "kind": self._kind}


def _kept(kind: str, read: Read, content: bytes) -> Manifest | None:
    """Return what is kept of an object, None if its content is too strange. Raises msgspec.DecodeError."""
    try:
        with isolated(f"a {kind}"):
            return read(content)
    except UnexpectedError as error:
        if isinstance(error.__cause__, msgspec.DecodeError):
            raise error.__cause__ from None
        log.warning("object.unreadable", kind=kind, cause=str(error))
        return None


@asynccontextmanager
async def open_client(
    connect: Callable[[], AbstractAsyncContextManager[ApiClient]], namespace: str, *, outage: Outage | None = None
) -> AsyncIterator[KubernetesClient]:
    """Yield a client for long use: it gets new credentials when its own have expired."""
    async with connect() as client:

        async def renew() -> None:
            async with connect() as fresh:
                client.configuration.api_key = fresh.configuration.api_key

        yield KubernetesClient(client, namespace, renew=renew, outage=outage)


class KubernetesClient:
    """Reads and writes objects of one namespace. `client` is open; the caller closes it.

    With an empty `namespace` it can list and watch objects of all namespaces.

    `renew`: gives the client new credentials when the server has refused the old ones; None if they do not expire.
    `outage`: shared by all clients of the same server.
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

    def everywhere(self) -> KubernetesClient:
        """Return a client of all namespaces, with the same connections."""
        return KubernetesClient(self._client, "", renew=self._renew, outage=self._outage)

    async def get(self, kind: str, name: str, *, metadata_only: bool = False) -> Manifest | None:
        """Return the object, or its metadata alone; None if there is none."""
        accept = _METADATA_ONLY if metadata_only else "application/json"
        return await self._request_if_found(_Request("GET", self._path(kind, name), accept=accept))

    async def rules(self) -> list[Manifest] | None:
        """Return the rules of what this account may do in the namespace, None where the cluster can't say."""
        path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
        try:
            found = await self._request(_Request("POST", path, body={"spec": {"namespace": self.namespace}}), _decoder)
        except ClusterError:
            return None
        status = found.get("status") or {}
        return None if status.get("incomplete", True) else status.get("resourceRules") or []

    async def is_terminating(self) -> bool:
        """Whether the namespace is being deleted, or gone: then it refuses new objects."""
        found = await self._request_if_found(_Request("GET", f"/api/v1/namespaces/{self.namespace}"))
        return found is None or "deletionTimestamp" in found["metadata"]

    async def metadata(self, manifest: Mapping[str, Any]) -> Manifest | None:
        """Return the metadata of the object with that kind and name, None if there is none.

        It is a dry-run patch, because our role may patch Secrets but not get them. Note that whoever may patch a Secret
        can also read it from the response.
        """
        path = self._path(manifest["kind"], manifest["metadata"]["name"])
        query, content_type = {"fieldManager": MANAGER, **_DRY_RUN}, "application/merge-patch+json"
        found = await self._request_if_found(_Request("PATCH", path, query, {}, content_type, _METADATA_ONLY))
        return found["metadata"] if found else None

    async def list(
        self, kind: str, *, labels: str = "", fields: str = "", read: Read = read_whole, is_retried: bool = True
    ) -> tuple[list[Manifest], str]:
        """Return what `read` returns of each object, and the list's resourceVersion. `is_retried`: see `stream`."""
        request = _Request("GET", self._path(kind), {"labelSelector": labels, "fieldSelector": fields})
        send = partial(self._answer, _ListDecoder(kind, read))
        items, metadata = await self._with_retries(send, request, for_s=None if is_retried else 0.0)
        return items, metadata.version

    async def list_all_namespaces(self, kind: str, read: Read, *, fields: str = "") -> builtins.list[Manifest]:
        """Return what `read` returns of each object of all namespaces, or of a kind without namespaces.

        Reads and keeps one page at a time, to save memory. Raises ResourceVersionExpiredError if the list expires
        between two pages each time.
        """
        for _ in range(MAX_LIST_ATTEMPTS - 1):
            with suppress(ResourceVersionExpiredError):
                return await self._list_pages(kind, read, fields)
        return await self._list_pages(kind, read, fields)

    async def _list_pages(self, kind: str, read: Read, fields: str) -> builtins.list[Manifest]:
        group, plural = _PATHS[kind]
        query = {"fieldSelector": fields, "limit": str(PAGE_SIZE)}
        kept: list[Manifest] = []
        while True:
            found, metadata = await self._request(_Request("GET", f"{group}/{plural}", query), _ListDecoder(kind, read))
            kept += found
            if not metadata.more:
                return kept
            query = {**query, "continue": metadata.more}

    async def create(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Manifest:
        """Create the object. Raises ConflictError if it exists. `dry_run`: only check the request."""
        query = {"fieldManager": MANAGER, **(_DRY_RUN if dry_run else {})}
        return await self._request(_Request("POST", self._path(manifest["kind"]), query, manifest), _decoder)

    async def apply(
        self, manifest: Mapping[str, Any], *, over: Mapping[str, Any] | None = None, dry_run: bool = False
    ) -> Manifest:
        """Create or change the object (server-side apply).

        `over`: the metadata of the object to change. Raises ConflictError if it has changed since, or was deleted.
        """
        query = {"fieldManager": MANAGER, "force": "true", **(_DRY_RUN if dry_run else {})}
        path = self._path(manifest["kind"], manifest["metadata"]["name"])
        exactly = {key: over[key] for key in ("uid", "resourceVersion")} if over else {}
        applied = {**manifest, "metadata": {**manifest["metadata"], **exactly}}
        return await self._request(_Request("PATCH", path, query, applied, "application/apply-patch+yaml"), _decoder)

    async def patch(self, manifest: Mapping[str, Any], change: Mapping[str, Any]) -> Manifest:
        """Change the object (JSON merge patch). Raises ConflictError if `change` has an old resourceVersion."""
        path = self._path(manifest["kind"], manifest["metadata"]["name"])
        query = {"fieldManager": MANAGER}
        return await self._request(_Request("PATCH", path, query, change, "application/merge-patch+json"), _decoder)

    async def set_if_same(
        self, owner: Manifest, annotations: Mapping[str, str], spec: Mapping[str, Any], *, same: Sequence[str]
    ) -> Manifest:
        """Change annotations and fields of the spec, whatever else has changed since, as its controller's status.

        Raises ConflictError if it is another object by now, or if one of the annotations in `same` has changed.
        """
        metadata = owner["metadata"]
        known = {_path_of(name): metadata["annotations"][name] for name in same if name in metadata["annotations"]}
        tests = {"/metadata/uid": metadata["uid"], **known}
        change = {_path_of(name): value for name, value in annotations.items()}
        change |= {f"/spec/{field}": value for field, value in spec.items()}
        body = [{"op": "test", "path": path, "value": value} for path, value in tests.items()]
        body += [{"op": "add", "path": path, "value": value} for path, value in change.items()]
        path, query = self._path(owner["kind"], metadata["name"]), {"fieldManager": MANAGER}
        try:
            return await self._request(_Request("PATCH", path, query, body, "application/json-patch+json"), _decoder)
        except ClusterError as error:
            if error.status == 422 and _TEST_FAILED in error.message:
                raise ConflictError(409, "Conflict", f"{path} has changed") from error
            raise

    async def patch_status(self, manifest: Mapping[str, Any], status: Mapping[str, Any]) -> Manifest:
        """Change fields of the object's status. Raises ConflictError if the object has changed since it was read."""
        path = f"{self._path(manifest['kind'], manifest['metadata']['name'])}/status"
        change = {"metadata": {"resourceVersion": manifest["metadata"]["resourceVersion"]}, "status": status}
        query, content_type = {"fieldManager": MANAGER}, "application/merge-patch+json"
        return await self._request(_Request("PATCH", path, query, change, content_type), _decoder)

    async def annotate(
        self, owner: Manifest, annotations: Mapping[str, str], spec: Mapping[str, Any] | None = None
    ) -> Manifest:
        """Change annotations and fields of the spec. Raises ConflictError if the object has changed since."""
        metadata = {"resourceVersion": owner["metadata"]["resourceVersion"], "annotations": dict(annotations)}
        return await self.patch(owner, {"metadata": metadata, **({"spec": dict(spec)} if spec else {})})

    async def delete(self, manifest: Mapping[str, Any], *, foreground: bool = False, exactly: bool = False) -> None:
        """Delete this object, but no other of its name; do nothing if it was deleted.

        `foreground`: delete what it owns first. `exactly`: raise ConflictError if it has changed.
        """
        metadata = manifest["metadata"]
        preconditions = {"uid": metadata["uid"]}
        if exactly:
            preconditions["resourceVersion"] = metadata["resourceVersion"]
        body = {"preconditions": preconditions, "propagationPolicy": "Foreground" if foreground else "Background"}
        try:
            await self._request_if_found(_Request("DELETE", self._path(manifest["kind"], metadata["name"]), {}, body))
        except ConflictError:  # unless `exactly`, another object has this name now: this one is gone
            if exactly:
                raise

    async def evict(self, pod: Mapping[str, Any]) -> bool:
        """Ask a pod to leave, as `kubectl drain` does; another is started in its place, and a Job counts no failure.

        False if its disruption budget does not allow that now, or if it has changed, as it leaves already, or is gone.
        Raises ClusterUnavailableError at once if the server is away.
        """
        name = pod["metadata"]["name"]
        preconditions = {field: pod["metadata"][field] for field in ("uid", "resourceVersion")}
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name},
            "deleteOptions": {"preconditions": preconditions},
        }
        request = _Request("POST", f"{self._path('Pod', name)}/eviction", body=body)
        try:
            await self._with_retries(partial(self._answer, _decoder), request, for_s=0.0)
        except ClusterUnavailableError as error:
            if isinstance(error.__cause__, _ServerBusyError):  # 429, by which the server names the budget
                return False
            raise
        except ClusterError as error:
            if error.status in (404, 409):
                return False
            raise
        return True

    async def watch(self, kind: str, *, labels: str = "", fields: str = "") -> AsyncIterator[dict[str, Manifest]]:
        """Yield all objects by name, first and after each change: the same dict each time. Never ends."""
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

    async def changes(
        self, kind: str, *, labels: str = "", fields: str = "", read: Read = read_whole, is_retried: bool = True
    ) -> AsyncIterator[WatchEvent]:
        """List, then yield all changes; list again when the resourceVersion has expired. Never ends.

        `read`: returns what of each object is yielded. `is_retried`: see `stream`.
        """
        while True:
            items, version = await self.list(kind, labels=labels, fields=fields, read=read, is_retried=is_retried)
            yield WatchEvent("LISTED", version, items)
            del items
            with suppress(ResourceVersionExpiredError):
                async for change in self._events(kind, labels, fields, version, read, is_retried=is_retried):
                    yield change

    async def _events(
        self, kind: str, labels: str, fields: str, version: str, read: Read, *, is_retried: bool
    ) -> AsyncIterator[WatchEvent]:
        query = {
            "labelSelector": labels,
            "fieldSelector": fields,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_TIMEOUT_S),
        }
        decoder = _EventDecoder(kind, read)
        while True:
            pause_s = 0.0
            try:
                at = {**query, "resourceVersion": version}
                opening = self.stream(self._path(kind), at, silent_s=WATCH_SILENCE_S, is_retried=is_retried)
                async with opening as response:
                    yield WatchEvent("OPENED", version)
                    async for line, ends in read_lines(response):
                        if not ends:
                            continue
                        what, thing = _decode_body(line, decoder)
                        if what == "ERROR":
                            raise _error_for(thing.get("code", 500), thing)
                        version = thing["metadata"]["resourceVersion"]
                        yield WatchEvent(what, version, [] if what == "BOOKMARK" else [thing])
            except (BrokenStreamError, _ServerBusyError):
                pause_s = RECONNECT_DELAY_S
            yield WatchEvent("CLOSED", version)
            await asyncio.sleep(pause_s)

    @asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str], *, silent_s: float, is_retried: bool = True
    ) -> AsyncIterator[ClientResponse]:
        """Open the response of a GET as a stream. Raises BrokenStreamError if the connection breaks while it is read.

        `silent_s`: the longest time without data. Without `is_retried`, raises ClusterUnavailableError at once if the
        server is away or busy.
        """
        import aiohttp

        timeout = aiohttp.ClientTimeout(sock_connect=REQUEST_TIMEOUT_S, sock_read=silent_s)
        request = _Request("GET", path, query, timeout=timeout)
        response = await self._with_retries(self._open, request, for_s=None if is_retried else 0.0)
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
        inside = f"/namespaces/{self.namespace}" if self.namespace else ""
        return f"{group}{inside}/{plural}" + (f"/{name}" if name else "")

    async def _request_if_found(self, request: _Request) -> Manifest | None:
        """As `_request`, with None for 404."""
        try:
            return await self._request(request, _decoder)
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    async def _request(self, request: _Request, decoder: _Decoder[Answer]) -> Answer:
        return await self._with_retries(partial(self._answer, decoder), request)

    async def _with_retries(
        self,
        send: Callable[[_Request], Awaitable[Answer]],
        request: _Request,
        *,
        for_s: float | None = None,
    ) -> Answer:
        """Return what `send` does, and repeat it while the server is away or busy, MAX_OUTAGE_S by default."""
        import aiohttp

        away = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, OSError, _ServerBusyError)
        pause_s, longest_s = RETRY_DELAYS_S
        most_s = MAX_OUTAGE_S if for_s is None else for_s
        began, is_logged, is_answered = clock(), False, False
        try:
            while True:
                try:
                    answer = await send(request)
                except away as error:
                    cause = str(error) or type(error).__name__
                    waited_s = clock() - began
                    if waited_s + pause_s > most_s:
                        raise ClusterUnavailableError(self.address, cause) from error
                    if not is_logged and waited_s >= LOG_OUTAGE_AFTER_S:
                        is_logged = True
                        self._outage.add(began, self.address, cause)
                except ClusterError:
                    is_answered = True
                    raise
                else:
                    is_answered = True
                    return answer
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - to spread retries
                pause_s = min(2 * pause_s, longest_s)
        finally:
            self._outage.remove(self.address, was_added=is_logged, is_answered=is_answered)

    async def _answer(self, decoder: _Decoder[Answer], request: _Request) -> Answer:
        async with await self._open(request) as response:
            content = bytearray()  # `response.read()` holds a list of thousands of pods twice
            async for block in response.content.iter_any():
                content += block
            return _decode_body(content, decoder)

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
    """Close the connection at once: a graceful close may outlast the event loop."""
    connection = response.connection
    if connection and connection.transport:
        connection.transport.abort()
    response.close()


def _decode_body(content: bytes | bytearray, decoder: _Decoder[Answer]) -> Answer:
    """Decode a response. Raises _ServerBusyError if it is not from an API server, as a proxy's error page."""
    try:
        return decoder.decode(content)
    except msgspec.DecodeError as error:
        raise _ServerBusyError(f"the response is not from an API server: {content[:80]!r}: {error}") from None


_decoder = JsonDecoder(Manifest)
_list_decoder = JsonDecoder(_List)
_event_decoder = JsonDecoder(_Event)


def _error_for(status: int, answer: Mapping[str, Any]) -> ClusterError | _ServerBusyError:
    if status in _BUSY_STATUSES:
        return _ServerBusyError(f"{status}: {answer.get('message', '')}")
    kinds: dict[int, type[ClusterError]] = {409: ConflictError, 410: ResourceVersionExpiredError}
    return kinds.get(status, ClusterError)(status, answer.get("reason") or "", answer.get("message") or "")


async def read_lines(response: ClientResponse, longest: int = 1 << 26) -> AsyncIterator[tuple[bytes, bool]]:
    """Yield a response's lines without newlines, each with whether the line ends there.

    Lines of more than `longest` bytes are split, always at the same positions. When the connection breaks, the start of
    an unfinished line comes before the error.
    """
    rest = b""
    try:
        async for block in response.content.iter_any():
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                while len(line) > longest:
                    yield line[:longest], False
                    line = line[longest:]  # noqa: PLW2901 - the rest of it
                yield line, True
            while len(rest) > longest:
                yield rest[:longest], False
                rest = rest[longest:]
    except Exception:
        if rest:
            yield rest, False
        raise
    if rest:
        yield rest, False
