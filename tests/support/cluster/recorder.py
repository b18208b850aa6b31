"""Records which verbs a client of the API server needs."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

from kubernetes_asyncio.client import ApiClient
from support.cluster.cluster import Cluster

from edl_runtime.backends.kubernetes.client import KubernetesClient

Verb = tuple[str, str, str]
"""An API group, a resource and what is done to it, as in ("apps", "deployments", "create")."""

CREATIONS = {("batch", "jobs", "create"), ("apps", "deployments", "create")}
"""What a submit rehearses by a dry run."""

OPTIONAL = {
    ("", "pods/eviction", "create"),  # that it is refused is logged
    ("", "resourcequotas", "list"),  # what is free is for rescaling
    ("", "resourcequotas", "watch"),
    ("kueue.x-k8s.io", "workloads", "list"),  # a job in a queue then does not say why it waits
    ("kueue.x-k8s.io", "workloads", "watch"),
}
"""Rights without which jobs run all the same."""

_CHANGED = {"jobs": "Job", "deployments": "Deployment", "trainingjobs": "TrainingJob"}

_PATH = re.compile(
    r"/(api|apis/(?P<group>[^/]+))/v1\w*(?P<inside>/namespaces/[^/]+)?/(?P<resource>[^/]+)(/(?P<name>[^/]+)(?P<part>/.+)?)?"
)


class Recorder:
    """An API client that records the verbs it needs: `used` in the namespace, `outside` beyond it.

    It changes each Job, Deployment and TrainingJob once before the client does, so that the client meets a conflict.
    """

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[ApiClient]], admin: Cluster) -> None:
        self.used: set[Verb] = set()
        self.outside: set[Verb] = set()
        self._connect = connect
        self._admin = admin
        self._changed: set[tuple[str, str]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ApiClient]:
        async with self._connect() as client:
            yield cast(ApiClient, _Recorded(client, self))

    async def before(self, kind: str, name: str) -> None:
        """Change an object, once."""
        if (kind, name) not in self._changed:
            self._changed.add((kind, name))
            async with self._admin.connect() as client:
                target = {"kind": kind, "metadata": {"name": name}}
                change = {"metadata": {"annotations": {"example/seen": "yes"}}}
                await KubernetesClient(client, self._admin.namespace).patch(target, change)


class _Recorded:
    def __init__(self, client: ApiClient, recorder: Recorder) -> None:
        self.configuration = client.configuration
        self._client = client
        self._recorder = recorder

    async def call_api(self, path: str, method: str, **more: Any) -> Any:
        found = _PATH.fullmatch(path)
        assert found, path
        resource = found["resource"] + (found["part"] or "")
        query = dict(more["query_params"])
        if method == "PATCH" and resource in _CHANGED and "dryRun" not in query:
            await self._recorder.before(_CHANGED[resource], found["name"])
        response = await self._client.call_api(path, method, **more)
        verbs = [_verb(method, named=bool(found["name"]), query=query)]
        if method == "PATCH" and response.status == 201:  # a server-side apply created it
            verbs.append("create")
        is_inside = found["inside"] or resource == "namespaces"  # a namespace is in itself: a Role may grant it
        recorded = self._recorder.used if is_inside else self._recorder.outside
        recorded.update((found["group"] or "", resource, verb) for verb in verbs)
        return response


def _verb(method: str, *, named: bool, query: dict[str, str]) -> str:
    if method == "GET":
        return "get" if named else "watch" if query.get("watch") else "list"
    return {"POST": "create", "PATCH": "patch", "DELETE": "delete"}[method]


def verbs_of(role: dict[str, Any]) -> set[Verb]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def of_kueue(verbs: set[Verb]) -> set[Verb]:
    """Return those for Kueue's objects, which only jobs in a queue need."""
    return {verb for verb in verbs if verb[0] == "kueue.x-k8s.io"}


def only(kind: str, objects: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [one for one in objects if one["kind"] == kind]
    return found
