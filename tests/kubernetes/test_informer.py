"""The informer: watched objects are read from memory, and are as current as those of a request."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest
from support.backends.jobs import WAITS, eventually, job, reach
from support.cluster.cluster import Cluster
from support.network.proxy import Proxy

from edl_runtime.backends.errors import ClusterUnavailableError, UnknownJobError
from edl_runtime.backends.interface import Backend
from edl_runtime.backends.kubernetes import informer
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.errors import BackendError

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]


async def job_exists(backend: Backend, name: str) -> bool:
    try:
        await backend.get(name)
    except UnknownJobError:
        return False
    return True


async def test_reads_of_a_followed_backend_send_no_requests(backend: KubernetesBackend, requests: list[str]) -> None:
    """Objects are listed and watched once, for any number of reads and of followers."""
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
            assert not await job_exists(other, "third")
            assert [status.name for status in await other.list()] == ["first", "second"]
            await asyncio.sleep(0.002)
    assert at_first == 5 + 5, requests  # a list and a watch of each kind
    assert requests[at_first:] == []


async def test_changes_by_others_are_seen(backend: KubernetesBackend) -> None:
    """A job that another backend creates, resizes and deletes."""
    async with backend.following() as followed:
        assert not await job_exists(followed, "job")
        await backend.submit(job(WAITS), token="theirs", secrets={})
        await eventually(lambda: job_exists(followed, "job"), "the job")
        await backend.resize("job", 2)
        await reach(followed, "job", lambda status: status.wanted == 2)
        await reach(followed, "job", lambda status: [one.phase for one in status.instances] == ["running"] * 2)
        assert (await followed.get("job")).instances == (await backend.get("job")).instances
        await backend.delete("job")

        async def is_gone() -> bool:
            return not await job_exists(followed, "job")

        await eventually(is_gone, "the end of the job")


async def test_a_followed_backend_survives_an_outage_of_the_api_server(
    backend: KubernetesBackend, proxied: tuple[Cluster, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns the last known state with a reason, an error after a while, and the current state after the outage."""
    monkeypatch.setattr(informer, "SILENCE_REPORTED_S", 0.5)
    far, proxy = proxied
    await backend.submit(job(WAITS), token="first", secrets={})

    async def has_reason() -> bool:
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

    async with far.backend().following() as followed:
        before = await followed.get("job")
        proxy.cut()
        assert (await followed.get("job")).created_at == before.created_at
        await backend.submit(job(WAITS), token="second", secrets={})
        assert (await followed.get("job")).token == "first"
        await eventually(has_reason, "a reason that names the API server")
        monkeypatch.setattr(informer, "MAX_OUTAGE_S", 1.0)
        await eventually(is_lost, "an error")
        proxy.mend()
        await eventually(is_back, "the current state")


@pytest.mark.deep
async def test_an_idle_or_closed_follower_has_no_tasks_and_connections(
    proxied: tuple[Cluster, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the idle timeout, and after the last follower has ended."""
    far, proxy = proxied

    async def all_closed() -> bool:
        return not proxy._peers and asyncio.all_tasks() == tasks

    tasks = asyncio.all_tasks()
    backend = far.backend()
    async with backend.following() as followed:
        assert asyncio.all_tasks() == tasks
        assert not await job_exists(followed, "job")
        assert asyncio.all_tasks() > tasks
        assert proxy._peers
    assert asyncio.all_tasks() == tasks
    await eventually(all_closed, "the end of all connections")
    with pytest.raises(BackendError, match="are closed"):
        await followed.get("job")

    monkeypatch.setattr(informer, "IDLE_TIMEOUT_S", 0.5)
    async with backend.following() as followed:
        assert not await job_exists(followed, "job")
        await eventually(all_closed, "the end of all connections")
        monkeypatch.undo()
        assert not await job_exists(followed, "job")
        async with backend.following():
            pass
        assert asyncio.all_tasks() > tasks
    assert asyncio.all_tasks() == tasks
    await eventually(all_closed, "the end of all connections")


@pytest.mark.deep
def test_closing_the_event_loop_leaves_no_unclosed_connection(proxied: tuple[Cluster, Proxy]) -> None:
    """Closing does not wait for the API server's side, which may never answer."""
    far, proxy = proxied
    backend = far.backend()

    async def follow() -> None:
        async with backend.following() as followed:
            with pytest.raises(UnknownJobError):
                await followed.get("job")
            ((informer_, *_),) = backend._followed.made.values()
            await eventually(lambda: _all_open(informer_), "watches that are open")
            proxy.lose()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            asyncio.run(follow())
            gc.collect()
    assert [str(one.message) for one in warned] == []


async def _all_open(informer_: informer.Informer) -> bool:
    return all(indexer._is_open for indexer in informer_._indexers if informer_._is_needed(indexer))
