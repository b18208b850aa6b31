"""What is followed is known without asking, and as surely as if it were asked for."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import Any

import pytest
from kubernetes_asyncio.client import ApiClient
from support.backends.jobs import WAITS, eventually, job, reach
from support.cluster.cluster import Cluster
from support.network.proxy import Proxy

from edl_runtime.backends.errors import ClusterUnavailableError, UnknownJobError
from edl_runtime.backends.interface import Backend
from edl_runtime.backends.kubernetes import informer
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.errors import BackendError

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that this process sends to the API server, as they are sent."""
    sent: list[str] = []
    call_api = ApiClient.call_api

    def counted(self: ApiClient, path: str, method: str, **more: Any) -> Any:
        sent.append(f"{method} {path}")
        return call_api(self, path, method, **more)

    monkeypatch.setattr(ApiClient, "call_api", counted)
    return sent


async def knows(backend: Backend, name: str) -> bool:
    try:
        await backend.get(name)
    except UnknownJobError:
        return False
    return True


async def test_a_thousand_looks_cost_what_one_costs(backend: KubernetesBackend, requests: list[str]) -> None:
    """However often, and for however many who follow, what is watched is asked for once."""
    for name in ("first", "second"):
        await backend.submit(job(WAITS, name=name), token="mine", secrets={})
        await reach(backend, name, lambda status: [one.phase for one in status.instances] == ["running"])
    async with backend.following() as one, backend.following() as other:
        requests.clear()
        for name in ("first", "second"):
            await one.get(name)
        at_first = len(requests)
        for _ in range(200):
            assert (await one.get("first")).wanted == 1
            assert (await other.get("second")).wanted == 1
            assert not await knows(other, "third")
            assert [status.name for status in await other.list()] == ["first", "second"]
            await asyncio.sleep(0.002)
    assert at_first == 5 + 5 + 2, requests  # a list and a watch of each kind, and once each job's pods
    assert requests[at_first:] == []


async def test_what_others_do_is_seen_soon(backend: KubernetesBackend) -> None:
    """A job that comes, changes and goes without us."""
    async with backend.following() as followed:
        assert not await knows(followed, "job")
        await backend.submit(job(WAITS), token="theirs", secrets={})
        await eventually(lambda: knows(followed, "job"), "the job")
        await backend.resize("job", 2)
        await reach(followed, "job", lambda status: status.wanted == 2)
        await reach(followed, "job", lambda status: [one.phase for one in status.instances] == ["running"] * 2)
        assert (await followed.get("job")).instances == (await backend.get("job")).instances
        await backend.delete("job")

        async def is_gone() -> bool:
            return not await knows(followed, "job")

        await eventually(is_gone, "the end of the job")


async def test_an_api_server_that_is_away_and_back(
    backend: KubernetesBackend, proxied: tuple[Cluster, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was known last, which says so; an error after a while; and all that has happened since when it is back."""
    monkeypatch.setattr(informer, "SILENCE_REPORTED_S", 0.5)
    way, proxy = proxied
    await backend.submit(job(WAITS), token="first", secrets={})

    async def is_told() -> bool:
        return (await followed.get("job")).reason.endswith(f":{proxy.port} does not answer")

    async def is_lost() -> bool:
        try:
            await followed.get("job")
        except ClusterUnavailableError:
            return True
        return False

    async def is_back() -> bool:
        if await is_lost():
            return False
        now = await followed.get("job")
        return (now.token, now.reason) == ("second", "")

    async with way.backend().following() as followed:
        before = await followed.get("job")
        proxy.cut()
        assert (await followed.get("job")).created_at == before.created_at
        await backend.submit(job(WAITS), token="second", secrets={})
        assert (await followed.get("job")).token == "first"
        await eventually(is_told, "that nobody answers")
        monkeypatch.setattr(informer, "MAX_OUTAGE_S", 1.0)
        await eventually(is_lost, "an error")
        proxy.mend()
        await eventually(is_back, "the state of now")


@pytest.mark.deep
async def test_nothing_is_left_open(proxied: tuple[Cluster, Proxy], monkeypatch: pytest.MonkeyPatch) -> None:
    """No task and no connection: once nobody asks, and when nobody follows any more."""
    way, proxy = proxied

    async def all_closed() -> bool:
        return not proxy._peers and asyncio.all_tasks() == tasks

    tasks = asyncio.all_tasks()
    backend = way.backend()
    async with backend.following() as followed:
        assert asyncio.all_tasks() == tasks
        assert not await knows(followed, "job")
        assert asyncio.all_tasks() > tasks
        assert proxy._peers
    assert asyncio.all_tasks() == tasks
    await eventually(all_closed, "the end of all connections")
    with pytest.raises(BackendError, match="not followed any more"):
        await followed.get("job")

    monkeypatch.setattr(informer, "IDLE_TIMEOUT_S", 0.5)
    async with backend.following() as followed:
        assert not await knows(followed, "job")
        await eventually(all_closed, "the end of all connections")
        monkeypatch.undo()
        assert not await knows(followed, "job")
        async with backend.following():
            pass
        assert asyncio.all_tasks() > tasks
    assert asyncio.all_tasks() == tasks
    await eventually(all_closed, "the end of all connections")


@pytest.mark.deep
def test_an_event_loop_that_is_closed_at_once_leaves_no_connection(proxied: tuple[Cluster, Proxy]) -> None:
    """Nobody waits for the API server to say goodbye, which it may never do."""
    way, proxy = proxied
    backend = way.backend()

    async def follow() -> None:
        async with backend.following() as followed:
            with pytest.raises(UnknownJobError):
                await followed.get("job")
            ((mirrored, _),) = backend._informers.values()
            await eventually(lambda: _all_open(mirrored), "watches that are open")
            proxy.lose()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            asyncio.run(follow())
            gc.collect()
    assert [str(one.message) for one in warned] == []


async def _all_open(mirrored: informer.Informer) -> bool:
    return all(indexer._is_open for indexer in mirrored._indexers)
