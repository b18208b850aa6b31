"""Outages of the API server: nothing is lost and nothing is done twice."""

from __future__ import annotations

import asyncio
import random
from itertools import count

import pytest
from support.backends.jobs import WAITS, eventually, job, reach, wait_for_line
from support.cluster.cluster import Cluster
from support.depth import examples
from support.network.proxy import Proxy

from edl_runtime.backends.interface import Backend

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

AWAY_S = examples(3, 30)

COUNTS = "import time\nfor number in range(900):\n    print(number)\n    time.sleep(0.05)"
"""A program that prints lines for longer than the outage."""


@pytest.fixture
def proxy(proxied: tuple[Cluster, Proxy]) -> Proxy:
    """The proxy between `far` and the API server."""
    return proxied[1]


@pytest.fixture
def far(proxied: tuple[Cluster, Proxy]) -> Backend:
    """A backend behind the proxy."""
    return proxied[0].backend()


async def test_requests_during_an_outage_are_completed_after_it(
    backend: Backend, far: Backend, proxy: Proxy, cluster: Cluster
) -> None:
    """An outage (half a minute in `make test-deep`) delays each request and fails none; each is done once."""
    for name in ("stays", "goes"):
        await backend.submit(job(WAITS, name=name), token="mine", secrets={})
    await far.get("stays")
    proxy.cut()
    requests = [
        asyncio.create_task(request)
        for request in (
            far.get("stays"),
            far.submit(job(WAITS, kind="trainer", name="comes"), token="mine", secrets={}),
            far.resize("stays", 2),
            far.delete("goes"),
            far.list(),
        )
    ]
    done, _ = await asyncio.wait(requests, timeout=AWAY_S)
    assert not done
    proxy.mend()
    status, submitted, resized, deleted, listed = await asyncio.gather(*requests)
    assert (status.name, submitted.token, resized.wanted, deleted) == ("stays", "mine", 2, True)
    assert "stays" in [one.name for one in listed]
    await wait_for_line(backend, "up", name="comes")
    assert [one.name for one in await backend.list()] == ["comes", "stays"]
    assert len(await cluster.list_objects("jobs")) == 1


@pytest.mark.deep
async def test_a_followed_log_has_each_line_once_after_an_outage(backend: Backend, far: Backend, proxy: Proxy) -> None:
    """Lines written during the outage come after it, also those of instances that started then."""
    await backend.submit(job(COUNTS, kind="trainer", elastic=True), token="mine", secrets={})
    seen: dict[int, list[str]] = {0: [], 1: []}

    async def follow() -> None:
        async for line in far.logs("job", follow=True):
            seen[line.instance].append(line.text)

    async def has_lines() -> bool:
        return len(seen[0]) > 20

    following = asyncio.create_task(follow())
    await eventually(has_lines, "lines of the first instance")
    proxy.cut()
    await backend.resize("job", 2)
    done, _ = await asyncio.wait([following], timeout=AWAY_S)
    assert not done
    before = len(seen[0])
    proxy.mend()
    await following
    assert before < 900
    assert seen == {index: [str(number) for number in range(900)] for index in (0, 1)}


@pytest.mark.deep
async def test_requests_over_a_connection_that_keeps_breaking_are_done_once(
    backend: Backend, far: Backend, proxy: Proxy, cluster: Cluster
) -> None:
    """A retried request does not repeat its effect, whether the request or the response was lost."""
    chance = random.Random(6)  # always the same
    over = asyncio.Event()

    async def break_it() -> None:
        for cut in count():
            (proxy.cut if cut % 2 == 0 else proxy.mend)()
            wait_s = chance.uniform(0.02, 0.08) if cut % 2 == 0 else chance.uniform(0.05, 0.3)
            await asyncio.sleep(wait_s)
            if over.is_set():
                break
        proxy.mend()

    breaking = asyncio.create_task(break_it())
    try:
        for kind in ("trainer", "pool"):
            spec = job(WAITS, kind=kind, instances=2)  # type: ignore[arg-type]
            submitted = await far.submit(spec, token="mine", secrets={"PASSWORD": "open sesame"})
            assert (submitted.token, submitted.wanted) == ("mine", 2)
            await reach(far, "job", lambda status: [one.phase for one in status.instances] == ["running"] * 2)
            counted = [len(await cluster.list_objects(what)) for what in ("jobs", "deployments", "pods", "secrets")]
            assert counted == [int(kind == "trainer"), int(kind == "pool"), 2, 1]
            assert (await far.resize("job", 3)).wanted == 3
            assert await far.delete("job")
            assert await backend.list() == []
    finally:
        over.set()
        await breaking
