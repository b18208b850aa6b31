"""Clients of `edl` connections: one for all requests that need it, and another one once the connection is edited."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from edl_airflow.client import EdlClient, open_client
from edl_airflow.hooks.edl import EdlConnection, EdlHook
from edl_airflow.runtime.spec import KubernetesBackendRef

LOOKUP_HOLDS_S = 3.0
"""An edited connection is noticed after so many seconds at most."""

IDLE_S = 30.0
"""After so many seconds without a user a client is closed."""

MOST_CONNECTIONS = 200
"""Contents of connections that are known at a time, those that were asked for first being dropped."""


class _Content(msgspec.Struct, frozen=True):
    """An `edl` connection, and the one of type `kubernetes` that it names, or an empty text."""

    edl: EdlConnection
    cluster: str

    def shares_watches(self, other: _Content) -> bool:
        """Whether both use one cache of a cluster's objects; see `edl_airflow.backends`."""
        return isinstance(self.edl.place, KubernetesBackendRef) and self.edl.place == other.edl.place


class Clients:
    """Opens clients by a digest of their connection's content. Belongs to one event loop.

    Digests are keyed with a secret of this object, so they tell nothing about the passwords in a connection.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._looked_up: dict[str, tuple[float, str]] = {}
        self._contents: OrderedDict[str, _Content] = OrderedDict()
        self._shared: dict[str, _SharedClient] = {}
        self._open: set[_SharedClient] = set()

    async def digest(self, conn_id: str) -> str:
        """Return the digest of a connection's content, which is another one after an edit.

        Raises SpecError, AirflowNotFoundException.
        """
        now = asyncio.get_running_loop().time()
        at, digest = self._looked_up.get(conn_id, (-LOOKUP_HOLDS_S, ""))
        if now >= at + LOOKUP_HOLDS_S or digest not in self._contents:
            content = await _look_up(conn_id)
            digest = hashlib.blake2b(msgspec.json.encode(content), key=self._key, digest_size=16).hexdigest()
            self._contents[digest] = content
            self._looked_up[conn_id] = (now, digest)
        self._contents.move_to_end(digest)
        while len(self._contents) > MOST_CONNECTIONS:
            self._contents.popitem(last=False)
            self._looked_up = {name: each for name, each in self._looked_up.items() if each[1] in self._contents}
        return digest

    @asynccontextmanager
    async def open(self, digest: str) -> AsyncIterator[EdlClient]:
        """Share the client of the connection with this digest, and open it if nobody has.

        It is closed when nobody has used it for IDLE_S, never while somebody does.
        """
        shared = self._shared.get(digest) or self._share(digest)
        shared.users += 1
        if shared.closing:
            shared.closing.cancel()
        try:
            yield await asyncio.shield(shared.client)
        finally:
            shared.users -= 1
            if not shared.users:
                wait_s = IDLE_S if self._shared.get(digest) is shared else 0.0
                shared.closing = asyncio.get_running_loop().call_later(wait_s, self._close, digest, shared)

    def _share(self, digest: str) -> _SharedClient:
        content = self._contents[digest]
        # Watches of another cluster would be taken for this one's
        edited = [
            one for one in self._open if one.content.shares_watches(content) and one.content.cluster != content.cluster
        ]
        for known, one in list(self._shared.items()):
            if one in edited:
                del self._shared[known]
                if not one.users:
                    one.unused.set()
        shared = self._shared[digest] = _SharedClient(content, [one.task for one in edited])
        self._open.add(shared)

        def ended(_: object) -> None:
            self._open.discard(shared)
            self._close(digest, shared)

        shared.task.add_done_callback(ended)
        return shared

    def _close(self, digest: str, shared: _SharedClient) -> None:
        if self._shared.get(digest) is shared:
            del self._shared[digest]
        shared.unused.set()


class _SharedClient:
    """A client in a task of its own, so that no request that ends takes it from the others.

    - `client`: the open client, or why it can't be opened. `users`: who have it now. `unused`: set to close it.
    - `closing`: when it is closed, unless another user comes.
    """

    def __init__(self, content: _Content, before: list[asyncio.Task[None]]) -> None:
        loop = asyncio.get_running_loop()
        self.content = content
        self.users = 0
        self.unused = asyncio.Event()
        self.closing: asyncio.TimerHandle | None = None
        self.client: asyncio.Future[EdlClient] = loop.create_future()
        self.client.add_done_callback(lambda client: client.cancelled() or client.exception())  # perhaps all have left
        self.task = loop.create_task(self._hold(before))

    async def _hold(self, before: list[asyncio.Task[None]]) -> None:
        try:
            if before:
                await asyncio.wait(before)
            async with open_client(self.content.edl) as client:
                self.client.set_result(client)
                await self.unused.wait()
        except Exception as error:
            if self.client.done():
                raise
            self.client.set_exception(error)
        finally:
            self.client.cancel()


async def _look_up(conn_id: str) -> _Content:
    connection = await EdlHook(conn_id).aedl_connection()
    place = connection.place
    cluster_conn_id = place.conn_id if isinstance(place, KubernetesBackendRef) else ""
    cluster = str((await EdlHook.aget_connection(cluster_conn_id)).get_uri()) if cluster_conn_id else ""
    return _Content(connection, cluster)
